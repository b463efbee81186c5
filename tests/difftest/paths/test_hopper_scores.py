import pytest
import torch

from difftest.paths import _hopper_scores as hopper
from difftest.paths.base import get_path


def e4m3(*shape: int, seed: int = 0) -> torch.Tensor:
    value = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 100
    return value.to(torch.float8_e4m3fn).float()


def test_an_addend_keeps_13_bits_below_the_largest_exponent() -> None:
    query, key = torch.zeros(1, 32), torch.ones(1, 32)
    query[0, 0], query[0, 1] = 128.0, 2.0**-6
    assert hopper.fp8_dot(query, key).item() == 128 + 2.0**-6, "exponent 7 - 13 = -6: the last bit that is kept"
    query[0, 0] = 256.0
    assert hopper.fp8_dot(query, key).item() == 256, "one below is dropped"
    query[0, 1] = -(2.0**-6)
    assert hopper.fp8_dot(query, key).item() == 256, "towards zero, whatever its sign"


def test_an_exponent_is_the_sum_of_the_operands_exponents() -> None:
    """1.5 * 1.5 counts as exponent 0 + 0 although it is 2.25, so two addends of 2^-13 survive and make 2^-12."""
    query, key = torch.zeros(1, 32), torch.zeros(1, 32)
    query[0, 0] = key[0, 0] = 1.5
    query[0, 1:3], key[0, 1:3] = 2.0**-6, 2.0**-7
    assert hopper.fp8_dot(query, key).item() == 2.25 + 2.0**-12
    query[0, 2] = 0
    assert hopper.fp8_dot(query, key).item() == 2.25, "one alone is lost when the sum is truncated to 14 bits"


def test_the_accumulator_is_truncated_after_every_32_products() -> None:
    query, key = torch.zeros(1, 64), torch.ones(1, 64)
    query[0, 0], query[0, 32] = 256.0, 2.0**-6
    together = torch.zeros(1, 64)
    together[0, 0], together[0, 1:33] = 256.0, 2.0**-6
    assert hopper.fp8_dot(query, key).item() == hopper.fp8_dot(together, key).item() == 256


def test_small_integers_are_exact() -> None:
    draw = torch.Generator().manual_seed(1)
    query, key = (torch.randint(-3, 4, (rows, 128), generator=draw).float() for rows in (5, 7))
    assert torch.equal(hopper.fp8_dot(query, key), query @ key.T)


def test_the_error_stays_within_four_truncations() -> None:
    query, key = e4m3(16, 128), e4m3(50, 128, seed=1)
    exact, magnitude = query.double() @ key.double().T, query.double().abs() @ key.double().abs().T
    error = (hopper.fp8_dot(query, key) - exact).abs()
    assert 1e-5 < float((error / magnitude).max()) < 4 * 2.0**-8
    assert not torch.equal(hopper.fp8_dot(query, key), query @ key.T)


def test_blocks_of_keys_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key = e4m3(16, 128), e4m3(50, 128, seed=1)
    whole = hopper.fp8_dot(query, key)
    monkeypatch.setattr(hopper, "BLOCK_BYTES", 16 * 32 * 4 * 7)
    assert torch.equal(hopper.fp8_dot(query, key), whole)


@pytest.mark.parametrize("heads", [8, 64])
def test_heads_add_up(heads: int) -> None:
    draw = torch.Generator().manual_seed(2)
    product, weight = torch.rand(3, heads, 20, generator=draw), torch.randn(3, heads, generator=draw)
    scale = torch.rand(20, generator=draw)
    want = torch.einsum("rhn,rh->rn", product.double(), weight.double()) * scale
    assert torch.allclose(hopper.reduce_heads(product, weight, scale).double(), want, rtol=1e-4, atol=1e-5)


def test_the_option_is_checked_and_declared() -> None:
    assert get_path("sglang-fp8-model").declares.score == "fp32"
    assert get_path("sglang-fp8-model:accumulator=wgmma").declares.score == "fp8_wgmma"
    with pytest.raises(ValueError, match="choose fp32 or wgmma"):
        get_path("sglang-fp8-model:accumulator=fp16")
