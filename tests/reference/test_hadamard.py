import pytest
import torch
from difftest.reference.hadamard import hadamard

EPSILON = 2.0**-52


def sylvester(width: int) -> torch.Tensor:
    """The explicit matrix: (-1)^popcount(i & j) / sqrt(width)."""
    signs = [[(-1.0) ** (i & j).bit_count() for j in range(width)] for i in range(width)]
    return torch.tensor(signs, dtype=torch.float64) * width**-0.5


@pytest.mark.parametrize("width", [1, 2, 8, 128])
def test_equals_the_explicit_matrix(width: int) -> None:
    """Of the identity every sum has one term, so both sides are the same rounding of 1 / sqrt(width)."""
    assert torch.equal(hadamard(torch.eye(width, dtype=torch.float64)), sylvester(width))


def test_is_its_own_inverse_and_keeps_dots() -> None:
    """Bound: 7 additions and a product, twice, each within 2^-53 of a partial sum below 128 max|x|."""
    x = torch.randn(40, 128, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    bound = 2 * 8 * EPSILON * 128**0.5 * float(x.abs().max())
    assert (hadamard(hadamard(x)) - x).abs().max() <= bound
    dots = hadamard(x) @ hadamard(x).T
    assert (dots - x @ x.T).abs().max() <= 128 * 2 * float(x.abs().max()) * bound


def test_sums_of_dyadic_numbers_are_exact() -> None:
    x = torch.randint(-64, 65, (9, 64), generator=torch.Generator().manual_seed(3)).double()
    exact = x @ (sylvester(64) * 8)
    assert torch.equal(hadamard(x), exact * 0.125)


def test_one_sided_transform_changes_scores() -> None:
    """The fault that a two-sided difference cannot show: on one side only, dots are lost."""
    x = torch.randn(4, 128, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    assert ((hadamard(x) * x).sum(-1) - (x * x).sum(-1)).abs().min() > 10


@pytest.mark.parametrize("width", [0, 3, 96])
def test_refuses_other_widths(width: int) -> None:
    with pytest.raises(ValueError, match=f"power-of-two width, and {width} is not"):
        hadamard(torch.zeros(2, width))
