import cmath
import math

import pytest
import torch
from difftest.reference.config import ModelConfig, load_config
from difftest.reference.rope import frequencies, rope_table, rotate, rotate_inverse
from hypothesis import given, settings
from hypothesis import strategies as st

FLASH = load_config("v4-flash")


def exact_frequency(config: ModelConfig, kind: str, pair: int) -> float:
    """YaRN by its formula, full speed above beta_fast turns, a 16th below beta_slow, else a ramp."""
    dim, theta = 64, 10000.0 if kind == "swa" else 160000.0
    frequency = theta ** (-2 * pair / dim)
    if kind == "swa":
        return frequency

    def pair_of(turns: float) -> float:
        return dim * math.log(65536 / (2 * math.pi * turns)) / (2 * math.log(theta))

    low, high = math.floor(pair_of(32)), math.ceil(pair_of(1))
    interpolated = min(1.0, max(0.0, (pair - low) / (high - low)))
    return frequency * (1 - interpolated) + frequency / 16 * interpolated


@pytest.mark.parametrize("kind", ["swa", "csa", "hca"])
def test_frequencies_follow_the_formula(kind: str) -> None:
    """In fp32 the power, the division by 16, the ramp and the sum round, 2^-24 each: fewer than 16 roundings."""
    expected = [exact_frequency(FLASH, kind, pair) for pair in range(32)]
    assert frequencies(FLASH, kind).double().tolist() == pytest.approx(expected, rel=16 * 2.0**-24)


def test_yarn_leaves_fast_pairs_and_divides_slow_ones() -> None:
    """Between the ends lies a strict ramp; a missing YaRN or one with swapped ends fails here."""
    plain = 160000.0 ** (-torch.arange(32).double() / 32)
    ratio = frequencies(FLASH, "csa").double() / plain
    assert ratio[:15].tolist() == pytest.approx([1.0] * 15, rel=1e-6)
    assert ratio[26:].tolist() == pytest.approx([1 / 16] * 6, rel=1e-6)
    assert (ratio[16:26].diff() < -0.01).all()


def test_table_is_the_published_fp32_table() -> None:
    position = torch.tensor([0, 1, 4, 65535, 1048575])
    table = rope_table(FLASH, "csa", position)
    angle = torch.outer(position, frequencies(FLASH, "csa"))
    assert table.dtype == torch.complex128
    assert torch.equal(table, torch.polar(torch.ones_like(angle), angle).to(torch.complex128))
    assert torch.equal(rope_table(FLASH, "csa", position.reshape(5, 1))[:, 0], table)


def test_position_zero_does_nothing_and_others_do() -> None:
    x = torch.randn(4, 128, dtype=torch.float64)
    assert torch.equal(rotate(x, rope_table(FLASH, "csa", torch.zeros(4, dtype=torch.int64))), x)
    moved = rotate(x, rope_table(FLASH, "csa", torch.ones(4, dtype=torch.int64)))
    assert torch.equal(moved[:, :64], x[:, :64])
    assert (moved[:, 64:] != x[:, 64:]).all()


def test_pairs_are_interleaved_in_the_last_64() -> None:
    """By hand: dims 64 + 2i and 65 + 2i are the real and imaginary part of pair i."""
    x = torch.arange(1, 129, dtype=torch.float64)[None]
    table = rope_table(FLASH, "csa", torch.tensor([127]))
    got = rotate(x, table)[0]
    for pair in range(32):
        turned = complex(x[0, 64 + 2 * pair], x[0, 65 + 2 * pair]) * complex(table[0, pair])
        assert cmath.isclose(complex(got[64 + 2 * pair], got[65 + 2 * pair]), turned, rel_tol=1e-15)


def test_a_row_table_serves_all_heads() -> None:
    x = torch.randn(3, 5, 128, dtype=torch.float64)
    table = rope_table(FLASH, "csa", torch.tensor([7, 8, 90]))
    per_head = torch.stack([rotate(x[:, head], table) for head in range(5)], 1)
    assert torch.equal(rotate(x, table), per_head)


@settings(deadline=None, max_examples=20)
@given(position=st.integers(0, 2**20 - 1), seed=st.integers(0, 2**32), kind=st.sampled_from(["swa", "csa", "hca"]))
def test_inverse_undoes(position: int, seed: int, kind: str) -> None:
    """An fp32 table has modulus 1 within 2^-23, so the pair is scaled by up to its square."""
    x = torch.randn(2, 128, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    table = rope_table(FLASH, kind, torch.tensor([position, position // 2]))
    assert (rotate_inverse(rotate(x, table), table) - x).abs().max() <= 2.0**-22 * x.abs().max()


@settings(deadline=None, max_examples=20)
@given(near=st.integers(0, 4000), far=st.integers(0, 4000), shift=st.integers(1, 4000), seed=st.integers(0, 2**32))
def test_dots_depend_on_the_distance_only(near: int, far: int, shift: int, seed: int) -> None:
    """Angles up to 8,000 are fp32: within 2^-24 * 8,000 of the product each, four of them, times the pairs' sizes."""
    x, y = torch.randn(2, 1, 128, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    dots = [
        (rotate(x, rope_table(FLASH, "csa", torch.tensor([near + by]))) *
         rotate(y, rope_table(FLASH, "csa", torch.tensor([far + by])))).sum()
        for by in (0, shift)
    ]  # fmt: skip
    bound = 4 * (8000 * 2.0**-24 + 2.0**-23) * x.norm() * y.norm()
    assert (dots[0] - dots[1]).abs() <= bound


def test_window_layers_turn_with_another_base() -> None:
    position = torch.tensor([1000])
    assert (rope_table(FLASH, "swa", position) - rope_table(FLASH, "hca", position)).abs().max() > 0.1
    assert torch.equal(rope_table(FLASH, "csa", position), rope_table(FLASH, "hca", position))
