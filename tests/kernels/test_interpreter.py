"""The interpreter's traps exist, and the kernels' own loads and roundings are not caught in them."""

import pytest
import torch
from difftest.kernels.interpreter import E4M3_MAX, round_in_kernel, traps


@pytest.mark.parametrize("trap", ["bf16 dot", "bf16 cast", "e4m3 cast"])
def test_plain_spelling_is_wrong_when_interpreted(trap: str) -> None:
    if not traps()[trap]:
        pytest.skip(f"this Triton interprets the plain {trap} like torch: the detour is no longer needed")
    assert traps()[trap]


def spread_values() -> torch.Tensor:
    """Fp32 values over every e4m3 binade and below, within +-448."""
    exponent = torch.randint(-14, 9, (1 << 14,))
    return (torch.randn(1 << 14) * torch.exp2(exponent)).clamp(-E4M3_MAX, E4M3_MAX)


def code_midpoints() -> torch.Tensor:
    """Every e4m3 value and every midpoint of two neighbours, both signs: the exact ties. 512 values, zero padded."""
    values = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    exact = torch.cat((values, (values[1:] + values[:-1]) / 2))
    both = torch.cat((exact, -exact))
    return torch.nn.functional.pad(both, (0, 512 - len(both)))


@pytest.mark.parametrize("values", [spread_values, code_midpoints])
def test_rounding_in_kernels_is_round_to_nearest_even(values) -> None:  # type: ignore[no-untyped-def]
    x = values()
    as_bf16, codes = round_in_kernel(x)
    assert torch.equal(as_bf16, x.bfloat16())
    assert torch.equal(codes, x.to(torch.float8_e4m3fn).view(torch.uint8))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # codes of numbers beyond e4m3 mean nothing
def test_bf16_ties_and_nan() -> None:
    bits = torch.arange(1 << 14, dtype=torch.int32) * 0x20000 + 0x8000  # a tie above every even bf16 up to infinity
    x = torch.cat((bits.view(torch.float32), (bits + 0x10000).view(torch.float32)))
    x = torch.where(x.isnan(), torch.nan, x)
    as_bf16, _ = round_in_kernel(x)
    assert torch.equal(as_bf16[~x.isnan()], x.bfloat16()[~x.isnan()])
    assert as_bf16[x.isnan()].isnan().all()
    assert x.isnan().any()
