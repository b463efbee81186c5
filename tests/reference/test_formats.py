import math

import pytest
import torch
from difftest.reference import formats
from difftest.reference.formats import FORMATS, Format, dequantise, pow2_ceil, quantise
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

CODED = {
    "e4m3fn": (formats.encode_e4m3fn, formats.decode_e4m3fn, 256),
    "e4m3fnuz": (formats.encode_e4m3fnuz, formats.decode_e4m3fnuz, 256),
    "e2m1": (formats.encode_e2m1, formats.decode_e2m1, 16),
}
TORCH_8BIT = {"e4m3fn": torch.float8_e4m3fn, "e4m3fnuz": torch.float8_e4m3fnuz}
ROUND = {
    "fp32": formats.round_fp32,
    "bf16": formats.round_bf16,
    "e4m3fn": formats.round_e4m3fn,
    "e4m3fnuz": formats.round_e4m3fnuz,
    "e2m1": formats.round_e2m1,
    "e2m1_ties_down": formats.round_e2m1_ties_down,
}


def magnitudes(name: str) -> Tensor:
    """Every finite non-negative number of a format, ascending; for fp32 a sample of neighbours in every binade."""
    if name == "bf16":
        bits = torch.arange(0x7F80, dtype=torch.int32) << 16
        return bits.view(torch.float32).double()
    if name == "fp32":
        starts = torch.arange(0, 255, dtype=torch.int64) << 23
        bits = torch.cat([starts, starts + 1, starts + 2, starts + (1 << 23) - 1]).sort().values
        return bits.to(torch.int32).view(torch.float32).double()
    decode, count = CODED["e2m1" if name.startswith("e2m1") else name][1:]
    values = decode(torch.arange(count, dtype=torch.uint8))
    return values[values.isfinite() & ~values.signbit()].unique()


def same(a: Tensor, b: Tensor) -> bool:
    """Equal values, equal signs of zero, NaN where NaN."""
    held = ~a.isnan()
    return (
        torch.equal(a.isnan(), b.isnan())
        and torch.equal(a[held], b[held])
        and torch.equal(a[held].signbit(), b[held].signbit())
    )


# ---- codes, by enumeration


@pytest.mark.parametrize("name", TORCH_8BIT)
def test_every_8bit_code_decodes_as_torch_does(name: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    assert same(CODED[name][1](codes), codes.view(TORCH_8BIT[name]).double())


def test_every_e2m1_code() -> None:
    levels = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    expected = torch.tensor(levels + [-level for level in levels], dtype=torch.float64)
    assert same(formats.decode_e2m1(torch.arange(16, dtype=torch.uint8)), expected)


@pytest.mark.parametrize("name", CODED)
def test_every_code_survives_decode_and_encode(name: str) -> None:
    encode, decode, count = CODED[name]
    codes = torch.arange(count, dtype=torch.uint8)
    values = decode(codes)
    assert torch.equal(encode(values)[~values.isnan()], codes[~values.isnan()])
    assert same(ROUND[name](values), values)


def test_nan_codes() -> None:
    nan = torch.tensor([math.nan])
    assert formats.encode_e4m3fn(nan).tolist() == [0x7F]
    assert formats.encode_e4m3fnuz(nan).tolist() == [0x80]
    with pytest.raises(ValueError, match="no NaN and the input holds 1"):
        formats.encode_e2m1(nan)


def test_every_ue8m0_code() -> None:
    codes = torch.arange(255, dtype=torch.uint8)
    values = formats.decode_ue8m0(codes)
    assert values.tolist() == [2.0 ** (code - 127) for code in range(255)]
    assert torch.equal(formats.encode_ue8m0(values), codes)
    assert formats.decode_ue8m0(torch.tensor([255], dtype=torch.uint8)).isnan().all()
    assert formats.encode_ue8m0(torch.tensor([math.nan, 2.0**200, 2.0**-200])).tolist() == [255, 254, 0]


def test_e4m3fn_bytes_read_as_e4m3fnuz_are_half() -> None:
    codes = torch.arange(1, 0x7F, dtype=torch.uint8)
    assert torch.equal(formats.decode_e4m3fnuz(codes) * 2, formats.decode_e4m3fn(codes))


# ---- rounding: every pair of neighbours, at the tie and on both sides of it


@pytest.mark.parametrize("sign", [1, -1], ids=["positive", "negative"])
@pytest.mark.parametrize("name", FORMATS)
def test_ties_and_their_neighbours(name: str, sign: int) -> None:
    format, values = FORMATS[name], magnitudes(name)
    low, high = values[:-1], values[1:]
    if name == "fp32":
        adjacent = high - low == format.step(low)
        low, high = low[adjacent], high[adjacent]
        assert len(low) >= 500
    tie = (low + high) / 2
    even = (low / format.step(low)) % 2 == 0
    at_tie = torch.where(even, low, high) if format.ties == "even" else low
    assert torch.equal(format.round(sign * tie), sign * at_tie)
    assert torch.equal(format.round(sign * torch.nextafter(tie, low)), sign * low)
    assert torch.equal(format.round(sign * torch.nextafter(tie, high)), sign * high)
    assert torch.equal(format.round(sign * low), sign * low)


@pytest.mark.parametrize("name", FORMATS)
def test_beyond_the_largest_number(name: str) -> None:
    format = FORMATS[name]
    largest = torch.tensor([format.max], dtype=torch.float64)
    half_way = largest + format.step(largest) / 2
    limit = format.max if format.overflow == "saturate" else math.inf
    assert format.round(torch.nextafter(half_way, largest)).item() == format.max
    for beyond in (half_way, half_way * 4, torch.tensor([math.inf])):
        assert format.round(beyond).item() == limit
        assert format.round(-beyond).item() == -limit
    assert format.round(torch.tensor([math.nan])).isnan().all()


@pytest.mark.parametrize("name", FORMATS)
def test_signed_zero(name: str) -> None:
    negative = torch.tensor([-0.0, -1e-300], dtype=torch.float64)
    rounded = FORMATS[name].round(negative)
    assert rounded.tolist() == [0, 0]
    assert rounded.signbit().tolist() == [FORMATS[name].signed_zero] * 2


def test_bf16_equals_torch_cast_on_fp32() -> None:
    """All 65,536 upper halves with the lower halves that matter: zero, around the tie, all ones."""
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    bits = (torch.arange(1 << 16)[:, None] << 16 | lower).flatten()
    x = torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)
    assert same(formats.round_bf16(x), x.bfloat16().double())


def test_fp32_equals_torch_cast_on_fp64() -> None:
    generator = torch.Generator().manual_seed(7)
    scale = 2.0 ** torch.randint(-152, 130, (200_000,), generator=generator).double()
    x = torch.randn(200_000, generator=generator, dtype=torch.float64) * scale
    assert same(formats.round_fp32(x), x.float().double())


@pytest.mark.parametrize("name", TORCH_8BIT)
def test_8bit_equals_torch_cast_inside_the_range(name: str) -> None:
    """Only up to the largest number: beyond it, torch's casts saturate or give NaN depending on format and release."""
    format = FORMATS[name]
    generator = torch.Generator().manual_seed(8)
    x = torch.randn(200_000, generator=generator) * 2.0 ** torch.randint(-14, 9, (200_000,), generator=generator)
    x = x.clamp(-format.max, format.max)
    assert same(format.round(x), x.to(TORCH_8BIT[name]).double())


def test_e4m3fn_saturates_where_ieee_rounding_would_leave_the_range() -> None:
    """torch has returned both 448 and NaN for values from 464 on; a clamp before the cast settles it."""
    x = torch.tensor([448.0, 463.9, 464.0, 480.0, 500.0, 512.0, 1e9])
    assert formats.round_e4m3fn(x).tolist() == [448.0] * 7
    assert x.clamp(max=448).to(torch.float8_e4m3fn).float().tolist() == [448.0] * 7


def test_rounding_from_fp64_is_not_rounding_twice() -> None:
    """1 + 2^-8 + 2^-40 lies above a bf16 tie; through fp32 it falls on the tie and rounds down."""
    x = torch.tensor([1 + 2**-8 + 2**-40], dtype=torch.float64)
    assert formats.round_bf16(x).item() == 1 + 2**-7
    assert x.float().bfloat16().item() == 1.0


# ---- spacing and preimages


@pytest.mark.parametrize("name", FORMATS)
def test_step_is_the_distance_to_the_next_number(name: str) -> None:
    values = magnitudes(name)
    if name == "fp32":
        values = values.unique()[:2]
    assert torch.equal(FORMATS[name].step(values[:-1]), values[1:] - values[:-1])


@pytest.mark.parametrize("name", FORMATS)
def test_preimage_of_every_number_ends_at_the_ties(name: str) -> None:
    format, values = FORMATS[name], magnitudes(name)
    low, high = format.preimage(values)
    if name != "fp32":
        assert torch.equal(high[:-1], (values[:-1] + values[1:]) / 2)
        assert torch.equal(low[1:], high[:-1])
    assert low[0] == -high[0]
    inside = torch.nextafter(low, values), torch.nextafter(high.clamp(max=2.0**129), values)
    if format.overflow == "saturate":
        assert high[-1] == math.inf
    for x in inside:
        assert torch.equal(format.round(x), values)
    outside = torch.nextafter(low, torch.tensor(-math.inf, dtype=low.dtype))
    assert (format.round(outside) != values).all()
    mirrored = format.preimage(-values)
    assert torch.equal(mirrored[0], -high) and torch.equal(mirrored[1], -low)


@pytest.mark.parametrize("name", ["bf16", "fp32"])
def test_preimage_of_infinity_starts_at_the_rounding_threshold(name: str) -> None:
    format = FORMATS[name]
    low, high = format.preimage(torch.tensor([math.inf, -math.inf]))
    assert high[0] == math.inf and low[1] == -math.inf and low[0] == -high[1]
    assert format.round(low[:1]).item() == math.inf
    assert format.round(torch.nextafter(low[:1], torch.zeros(1, dtype=low.dtype))).item() == format.max


@pytest.mark.parametrize("name", FORMATS)
def test_preimage_of_what_the_format_lacks_is_empty(name: str) -> None:
    low, high = FORMATS[name].preimage(torch.tensor([1 + 2**-30, math.nan], dtype=torch.float64))
    assert low.tolist() == [math.inf] * 2 and high.tolist() == [-math.inf] * 2


@settings(deadline=None, max_examples=25)
@given(name=st.sampled_from(sorted(FORMATS)), seed=st.integers(0, 2**32), power=st.integers(-140, 120))
def test_rounding_is_nearest_monotone_odd_and_idempotent(name: str, seed: int, power: int) -> None:
    format = FORMATS[name]
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(500, generator=generator, dtype=torch.float64) * 2.0**power).sort().values
    y = format.round(x)
    low, high = format.preimage(y)
    assert ((low <= x) & (x <= high)).all()
    assert (y.diff() >= 0).all()
    assert torch.equal(format.round(-x), -y)
    assert torch.equal(format.round(y), y)


# ---- power-of-two scales and quantisers


def test_pow2_ceil() -> None:
    powers = 2.0 ** torch.arange(-200, 200).double()
    assert torch.equal(pow2_ceil(powers), powers)
    assert torch.equal(pow2_ceil(torch.nextafter(powers, 2 * powers)), 2 * powers)
    assert torch.equal(pow2_ceil(torch.nextafter(powers, powers / 2)), powers)


def expected_scale(quantiser: str, amax: float) -> float:
    """The scale rules of the quantisers, written out with Python floats."""
    floor = float(torch.tensor(1e-4))
    if quantiser == "e4m3":
        return float(torch.tensor(max(floor, amax) / 448, dtype=torch.float64).float())
    ratio = {"e4m3_pow2": max(floor, amax) / 448, "e2m1_ties_down": max(floor, amax) / 6}.get(
        quantiser, max(6 * 2.0**-126, amax) / 6
    )
    return 2.0 ** math.ceil(math.log2(ratio))


@pytest.mark.parametrize("amax", [0.0, 1e-30, 9e-5, 1.1e-4, 0.75, 448.0, 448.5, 3.0e5])
@pytest.mark.parametrize(
    ("quantiser", "block"), [("e4m3", 128), ("e4m3_pow2", 64), ("e2m1", 32), ("e2m1_ties_down", 32)]
)
def test_quantise_follows_its_scale_rule(quantiser: formats.Quantiser, block: int, amax: float) -> None:
    x = torch.linspace(-1, 1, 256, dtype=torch.float64).reshape(2, 128) * amax
    codes, scale = quantise(x, quantiser)
    assert scale.shape == (2, 128 // block)
    format = FORMATS["e4m3fn" if quantiser.startswith("e4m3") else quantiser]
    for row in range(2):
        for number in range(128 // block):
            part = x[row, number * block : (number + 1) * block]
            assert scale[row, number].item() == expected_scale(quantiser, part.abs().max().item())
            expected = format.round(part / scale[row, number])
            assert torch.equal(codes[row, number * block : (number + 1) * block], expected)
    assert torch.equal(dequantise(codes, scale), codes * scale.repeat_interleave(block, 1))


def test_quantise_without_scale() -> None:
    x = torch.tensor([[1 + 2**-9, 3.0]], dtype=torch.float64)
    assert torch.equal(quantise(x, "none")[0], x)
    assert quantise(x, "bf16")[0].tolist() == [[1.0, 3.0]]
    assert torch.equal(dequantise(*quantise(x, "none")), x)


def test_quantise_refuses_a_partial_block() -> None:
    with pytest.raises(ValueError, match="blocks of 128 and the last axis is 96"):
        quantise(torch.zeros(2, 96), "e4m3")


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 2**32), power=st.integers(-3, 20), quantiser=st.sampled_from(["e4m3_pow2", "e2m1"]))
def test_power_of_two_scaling_moves_into_the_scale(seed: int, power: int, quantiser: formats.Quantiser) -> None:
    x = torch.randn(4, 128, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    codes, scale = quantise(x, quantiser)
    scaled_codes, scaled = quantise(x * 2.0**power, quantiser)
    assert torch.equal(codes, scaled_codes) and torch.equal(scale * 2.0**power, scaled)


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 2**32), quantiser=st.sampled_from(["e4m3", "e4m3_pow2", "e2m1", "e2m1_ties_down"]))
def test_quantisation_error_is_within_half_a_step(seed: int, quantiser: formats.Quantiser) -> None:
    """Half the format's step at the scaled value, or the clip beyond the largest code (an fp32 scale: 2^-24 of it)."""
    x = torch.randn(4, 128, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    codes, scale = quantise(x, quantiser)
    format: Format = formats.SCALINGS[quantiser].format
    each = scale.repeat_interleave(128 // scale.shape[1], 1)
    half_step = format.step(x / each) * each / 2
    clip = format.max * each * 2.0**-24
    assert ((dequantise(codes, scale) - x).abs() <= half_step.clamp(min=0) + clip).all()
