import math

import pytest
import torch
from difftest.reference.norm import rms_norm


def test_is_the_formula() -> None:
    x, weight, eps = [1.0, -2.0, 4.0, 0.5], [2.0, 1.0, 0.25, -1.0], 1e-3
    size = math.sqrt(sum(value * value for value in x) / 4 + eps)
    expected = [value * factor / size for value, factor in zip(x, weight, strict=True)]
    got = rms_norm(torch.tensor([x], dtype=torch.bfloat16), torch.tensor(weight), eps)
    assert got.dtype == torch.float64
    assert got[0].tolist() == pytest.approx(expected, rel=1e-15)


def test_eps_decides_for_tiny_rows() -> None:
    """With x^2 far below eps the norm is x / sqrt(eps): a zero row stays zero instead of becoming NaN."""
    tiny = torch.full((1, 8), 1e-9, dtype=torch.float64)
    assert rms_norm(tiny, None, 1e-6)[0].tolist() == pytest.approx([1e-6] * 8, rel=1e-9)
    assert rms_norm(torch.zeros(1, 8), None, 1e-6).tolist() == [[0.0] * 8]


def test_power_of_two_scaling_cancels_without_eps() -> None:
    x = torch.randn(5, 128, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert torch.equal(rms_norm(x, None, 0.0), rms_norm(x * 2.0**9, None, 0.0))
