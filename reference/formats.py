"""Number formats: exact rounding from fp64, bit codes, spacing, preimages, and the quantisers of the cache layouts.

Every rounding takes fp64 (other dtypes are upcast) and returns fp64, in one step: rounding through fp32 first would
round twice.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

MANTISSA_BITS = 52
EXPONENT_BIAS = 1023
"""fp64's own layout, used to take values apart without a library call that a device might approximate."""

Overflow = Literal["inf", "saturate"]
Ties = Literal["even", "down"]


@dataclass(frozen=True)
class Format:
    """A binary floating-point format.

    fraction      stored mantissa bits.   min_exponent   exponent of the smallest normal number.
    max           largest finite value.
    overflow      what lies beyond `max`: infinity as IEEE rounds, or `max` itself (conversion with saturation).
    ties          a value half way goes to the even mantissa, or towards zero (strict ">" thresholds).
    signed_zero   whether -0 exists; if not, -0 becomes +0.
    """

    name: str
    fraction: int
    min_exponent: int
    max: float
    overflow: Overflow = "saturate"
    ties: Ties = "even"
    signed_zero: bool = True

    def step(self, x: Tensor) -> Tensor:
        """Spacing of the format's numbers in the binade of |x| (at a power of two: the spacing above it), fp64."""
        return power_of_two(exponent(x).clamp(min=self.min_exponent) - self.fraction)

    def round(self, x: Tensor) -> Tensor:
        """The format's number nearest to x, fp64 to fp64. NaN stays NaN."""
        exact = x.double()
        step = self.step(exact)
        steps = exact / step
        steps = steps.round() if self.ties == "even" else ((steps.abs() - 0.5).ceil().clamp(min=0.0)).copysign(steps)
        rounded = steps * step
        if self.overflow == "saturate":
            rounded = rounded.clamp(-self.max, self.max)
        else:
            rounded = torch.where(rounded.abs() > self.max, torch.inf * rounded.sign(), rounded)
        return rounded if self.signed_zero else rounded + 0.0

    def holds(self, y: Tensor) -> Tensor:
        """Whether y is a number (not NaN) of this format; infinities only where the format has them."""
        return self.round(y) == y.double()

    def preimage(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """The closed interval (lo, hi) of reals around y beyond which no real rounds to y, fp64.

        Ends are the midpoints to y's neighbours, whichever way a tie goes. `max` of a saturating format reaches to
        infinity, so does an infinity. A y that is not in the format has the empty interval (inf, -inf).
        """
        exact = y.double()
        size = exact.abs()
        binade, step = exponent(size), self.step(size)
        above = size + step / 2
        narrower = (size == power_of_two(binade)) & (binade > self.min_exponent)
        below = size - torch.where(narrower, 0.25, 0.5) * step
        beyond = self.max + math.ldexp(1.0, math.frexp(self.max)[1] - self.fraction - 2)
        if self.overflow == "saturate":
            above = torch.where(size == self.max, torch.inf, above)
        else:
            below = torch.where(size.isinf(), beyond, below)
            above = torch.where(size.isinf(), torch.inf, above)
        low = torch.where(exact < 0, -above, below)
        high = torch.where(exact < 0, -below, above)
        held = self.holds(exact)
        return torch.where(held, low, torch.inf), torch.where(held, high, -torch.inf)


def exponent(x: Tensor) -> Tensor:
    """floor(log2 |x|) of fp64 values, int64, exact; -1023 for zero and fp64 subnormals, 1024 for inf and NaN."""
    return (x.double().contiguous().view(torch.int64) >> MANTISSA_BITS & (2 * EXPONENT_BIAS + 1)) - EXPONENT_BIAS


def power_of_two(power: Tensor) -> Tensor:
    """2^power, exact fp64, for int64 powers clamped to fp64's normal range -1022 to 1023."""
    return (power.clamp(1 - EXPONENT_BIAS, EXPONENT_BIAS) + EXPONENT_BIAS << MANTISSA_BITS).view(torch.float64)


def pow2_ceil(x: Tensor) -> Tensor:
    """Smallest power of two >= x, fp64, for x > 0: the rounding of ue8m0 scales."""
    exact = x.double()
    floor = power_of_two(exponent(exact))
    return torch.where(floor < exact, 2 * floor, floor)


FORMATS: dict[str, Format] = {
    format.name: format
    for format in (
        Format("fp32", 23, -126, (2 - 2.0**-23) * 2.0**127, "inf"),
        Format("bf16", 7, -126, (2 - 2.0**-7) * 2.0**127, "inf"),
        Format("e4m3fn", 3, -6, 448.0),
        Format("e4m3fnuz", 3, -7, 240.0, signed_zero=False),
        Format("e2m1", 1, 0, 6.0),
        Format("e2m1_ties_down", 1, 0, 6.0, ties="down", signed_zero=False),
    )
}


def round_fp32(x: Tensor) -> Tensor:
    """x rounded to fp32, ties to even, overflow to infinity; fp64."""
    return FORMATS["fp32"].round(x)


def round_bf16(x: Tensor) -> Tensor:
    """x rounded to bf16, ties to even, overflow to infinity; fp64."""
    return FORMATS["bf16"].round(x)


def round_e4m3fn(x: Tensor) -> Tensor:
    """x rounded to OCP e4m3 (float8_e4m3fn), ties to even, saturating at 448; fp64."""
    return FORMATS["e4m3fn"].round(x)


def round_e4m3fnuz(x: Tensor) -> Tensor:
    """x rounded to e4m3fnuz (bias 8, no -0, no inf), ties to even, saturating at 240; fp64."""
    return FORMATS["e4m3fnuz"].round(x)


def round_e2m1(x: Tensor) -> Tensor:
    """x rounded to e2m1 (0, .5, 1, 1.5, 2, 3, 4, 6), ties to even, saturating at 6; fp64."""
    return FORMATS["e2m1"].round(x)


def round_e2m1_ties_down(x: Tensor) -> Tensor:
    """x rounded to e2m1 by strict ">" thresholds: ties go towards zero; fp64."""
    return FORMATS["e2m1_ties_down"].round(x)


# ---- bit codes: sign, exponent, mantissa; a code's magnitude counts the format's numbers upwards from zero


def _encode(x: Tensor, format: Format, sign_bit: int, nan: int | None) -> Tensor:
    rounded = format.round(x)
    missing = rounded.isnan()
    if nan is None and bool(missing.any()):
        raise ValueError(f"{format.name} has no NaN and the input holds {int(missing.sum())}: check the inputs first")
    size = rounded.nan_to_num().abs()
    binade = exponent(size).clamp(min=format.min_exponent)
    count = (binade - format.min_exponent << format.fraction) + (size / format.step(size)).long()
    negative = rounded.signbit() & (format.signed_zero | (size > 0))
    code = count + negative * sign_bit
    return torch.where(missing, nan or 0, code).to(torch.uint8)


def _decode(code: Tensor, format: Format, sign_bit: int) -> Tensor:
    count = code.long() & (sign_bit - 1)
    binade = (count >> format.fraction).clamp(min=1)
    mantissa = count - (binade - 1 << format.fraction)
    size = mantissa.double() * power_of_two(binade - 1 + format.min_exponent - format.fraction)
    return torch.where(code.long() & sign_bit > 0, -size, size)


def encode_e4m3fn(x: Tensor) -> Tensor:
    """Bytes of round_e4m3fn(x), uint8; NaN is 0x7f."""
    return _encode(x, FORMATS["e4m3fn"], 0x80, 0x7F)


def decode_e4m3fn(code: Tensor) -> Tensor:
    """Values of e4m3fn bytes, fp64; 0x7f and 0xff are NaN."""
    value = _decode(code, FORMATS["e4m3fn"], 0x80)
    return value.masked_fill(code.long() & 0x7F == 0x7F, torch.nan)


def encode_e4m3fnuz(x: Tensor) -> Tensor:
    """Bytes of round_e4m3fnuz(x), uint8; NaN is 0x80."""
    return _encode(x, FORMATS["e4m3fnuz"], 0x80, 0x80)


def decode_e4m3fnuz(code: Tensor) -> Tensor:
    """Values of e4m3fnuz bytes, fp64; 0x80 is NaN."""
    return _decode(code, FORMATS["e4m3fnuz"], 0x80).masked_fill(code.long() == 0x80, torch.nan)


def encode_e2m1(x: Tensor) -> Tensor:
    """4-bit codes of round_e2m1(x), one per uint8; ValueError on NaN, which e2m1 does not have."""
    return _encode(x, FORMATS["e2m1"], 0x8, None)


def decode_e2m1(code: Tensor) -> Tensor:
    """Values of e2m1 codes 0 to 15, fp64."""
    return _decode(code, FORMATS["e2m1"], 0x8)


def encode_ue8m0(scale: Tensor) -> Tensor:
    """Bytes of power-of-two scales, uint8 = log2(pow2_ceil(scale)) + 127, clamped to 0..254; NaN is 255."""
    code = (exponent(pow2_ceil(scale)) + UE8M0_BIAS).clamp(0, UE8M0_NAN - 1)
    return torch.where(scale.isnan(), UE8M0_NAN, code).to(torch.uint8)


def decode_ue8m0(code: Tensor) -> Tensor:
    """Scales 2^(code - 127), fp64; 255 is NaN."""
    return power_of_two(code.long() - UE8M0_BIAS).masked_fill(code.long() == UE8M0_NAN, torch.nan)


UE8M0_BIAS = 127
UE8M0_NAN = 255


# ---- quantisers: a format, a block and a scale rule

Quantiser = Literal["none", "bf16", "e4m3", "e4m3_pow2", "e2m1", "e2m1_ties_down"]


@dataclass(frozen=True)
class Scaling:
    """How a quantiser picks the scale of `block` neighbouring values: round(max(floor, amax) / format.max)."""

    format: Format
    block: int
    floor: float
    round: Callable[[Tensor], Tensor]


FLOOR_E4M3 = float(torch.tensor(1e-4, dtype=torch.float32))
"""amax floor of the e4m3 quantisers (`kernel.py` act_quant and SGLang's kernels): 1e-4 as fp32."""

FLOOR_E2M1 = 6 * 2.0**-126
"""amax floor of `kernel.py` fp4_act_quant: the smallest normal fp32 scale."""

SCALINGS: dict[str, Scaling] = {
    "e4m3": Scaling(FORMATS["e4m3fn"], 128, FLOOR_E4M3, round_fp32),
    "e4m3_pow2": Scaling(FORMATS["e4m3fn"], 64, FLOOR_E4M3, pow2_ceil),
    "e2m1": Scaling(FORMATS["e2m1"], 32, FLOOR_E2M1, pow2_ceil),
    "e2m1_ties_down": Scaling(FORMATS["e2m1_ties_down"], 32, FLOOR_E4M3, pow2_ceil),
}


def quantise(x: Tensor, quantiser: Quantiser) -> tuple[Tensor, Tensor]:
    """Code values and scales of x along its last axis; the stored number is code value * scale of its block.

    x [..., D]. Returns code values [..., D] fp64 and scale [..., D / block] fp64. `none` and `bf16` have one scale of
    1. Raises ValueError when D is not a multiple of the block.
    """
    exact = x.double()
    if quantiser in ("none", "bf16"):
        codes = exact if quantiser == "none" else round_bf16(exact)
        return codes, torch.ones(*exact.shape[:-1], 1, dtype=torch.float64, device=x.device)
    scaling = SCALINGS[quantiser]
    if x.shape[-1] % scaling.block:
        raise ValueError(
            f"{quantiser} scales blocks of {scaling.block} and the last axis is {x.shape[-1]}: cut or pad it"
        )
    blocks = torch.unflatten(exact, -1, (-1, scaling.block))
    scale = scaling.round(blocks.abs().amax(-1).clamp(min=scaling.floor) / scaling.format.max)
    return scaling.format.round(blocks / scale[..., None]).flatten(-2), scale


def dequantise(codes: Tensor, scale: Tensor) -> Tensor:
    """Values from `quantise`'s code values [..., D] and scale [..., blocks], fp64."""
    blocks = torch.unflatten(codes.double(), -1, (scale.shape[-1], -1))
    return (blocks * scale.double()[..., None]).flatten(-2)
