from collections.abc import Callable
from typing import Any

import pytest
import torch
from difftest.reference import compressor, deepseek, formats
from difftest.reference.config import load_config
from difftest.reference.hadamard import hadamard
from difftest.reference.norm import rms_norm
from difftest.reference.rope import rope_table, rotate
from torch import Tensor

FLASH = load_config("v4-flash")
BF16_STEP = 2.0**-7
"""Spacing of bf16 relative to a number: at most 2^-7 of it."""


def bf16_values() -> Tensor:
    """Every finite bf16 number, [65280]."""
    values = (torch.arange(1 << 16, dtype=torch.int32) << 16).view(torch.float32)
    return values[values.isfinite()].to(torch.bfloat16)


def assert_rounds(got: Tensor, exact: Tensor, fp32_error: Tensor | float) -> None:
    """got is bf16 and equals exact, off by at most `fp32_error` before the one rounding to bf16."""
    assert got.dtype == torch.bfloat16
    low, high = formats.FORMATS["bf16"].preimage(got.double())
    assert ((exact >= low - fp32_error) & (exact <= high + fp32_error)).all()


# ---- scales and fake quantisation


def test_pow2_ceil_by_bits_is_pow2_ceil() -> None:
    x = torch.randn(10_000).abs() * 2.0 ** torch.randint(-100, 100, (10_000,))
    x = torch.cat((x, 2.0 ** torch.arange(-126, 127).float()))
    assert torch.equal(deepseek.pow2_ceil(x).double(), formats.pow2_ceil(x))


def test_fp4_rounds_as_e2m1_for_every_amax_and_tie() -> None:
    """Rows: every positive bf16 amax from the floor up to 2^120; columns: the ties of its scale and values between."""
    amax = bf16_values().double()
    amax = amax[(amax >= 6 * 2.0**-126) & (amax < 2.0**120)]
    scale = formats.pow2_ceil(amax / 6)
    grid = torch.arange(-31, 31).double() / 8
    x = (grid * scale[:, None]).clamp(-amax[:, None], amax[:, None])
    x = torch.cat((amax[:, None], x[:, :31]), 1).to(torch.bfloat16)
    got = deepseek.fp4_fake_quant(x)
    assert torch.equal(got.double(), formats.dequantise(*formats.quantise(x, "e2m1")))
    ties = formats.dequantise(*formats.quantise(x, "e2m1_ties_down"))
    assert (got.double() != ties).any()


def test_fp4_of_nothing_is_nothing() -> None:
    assert (deepseek.fp4_fake_quant(torch.zeros(2, 64, dtype=torch.bfloat16)) == 0).all()


def test_published_kv_fake_quant_is_the_identity() -> None:
    """On every finite bf16 number in blocks of neighbours, and shuffled among magnitudes 2^-80 to 2^40."""
    values = bf16_values()
    mixed = values[(values.abs() >= 2.0**-80) & (values.abs() < 2.0**40)]
    mixed = mixed[torch.randperm(len(mixed))]
    for x in (values.reshape(-1, 64), mixed.reshape(-1, 64)):
        assert torch.equal(deepseek.fp8_fake_quant(x, "published"), x)


def test_intended_kv_fake_quant_is_e4m3_with_power_of_two_scale() -> None:
    x = (torch.randn(200, 448) * torch.randn(200, 1).mul(3).exp()).to(torch.bfloat16)
    got = deepseek.fp8_fake_quant(x, "intended")
    assert torch.equal(got.double(), formats.dequantise(*formats.quantise(x, "e4m3_pow2")))
    error = (got.double() - x.double()).norm() / x.double().norm()
    assert 0.02 < error < 0.03


# ---- steps, each with its one rounding


def test_norm_rounds_once() -> None:
    """fp32 inside: 128 squares and sums, rsqrt and two products, each 2^-24 of the value."""
    x, weight = torch.randn(50, 128).to(torch.bfloat16), torch.randn(128)
    exact = rms_norm(x, weight, 1e-6)
    assert_rounds(deepseek.rms_norm(x, weight, 1e-6), exact, exact.abs() * 140 * 2.0**-24)


def test_rotation_rounds_once_and_only_the_tail() -> None:
    x = torch.randn(50, 3, 128).to(torch.bfloat16)
    table = rope_table(FLASH, "csa", torch.arange(50) * 101)
    got = deepseek.rotate(x, table)
    assert torch.equal(got[..., :64], x[..., :64])
    assert_rounds(got, rotate(x, table), 4 * 2.0**-24 * float(x.abs().max()))


def test_hadamard_rounds_once() -> None:
    x = torch.randn(50, 128).to(torch.bfloat16)
    assert_rounds(deepseek.rotate_activation(x), hadamard(x), 8 * 2.0**-24 * 128**0.5 * float(x.abs().max()))


def test_head_weight_rounds_once() -> None:
    weight = torch.randn(30, 64).to(torch.bfloat16)
    exact = weight.double() * FLASH.index_scale
    assert_rounds(deepseek.head_weight(weight, FLASH.index_scale), exact, exact.abs() * 2.0**-23)


def test_key_and_query_pass_every_rounding_point() -> None:
    """Against the chain of exact steps with a bf16 rounding after each. fp32 noise may tip one in a thousand."""
    pooled, weight = torch.randn(200, 128), torch.randn(128)
    table = rope_table(FLASH, "csa", torch.arange(200) * 4)
    bf16 = formats.round_bf16
    normed = bf16(rms_norm(bf16(pooled), weight, 1e-6))
    key = formats.dequantise(*formats.quantise(bf16(hadamard(bf16(rotate(normed, table)))), "e2m1"))
    got = deepseek.index_key(pooled, weight, 1e-6, table).double()
    assert (got != key).double().mean() < 0.001

    q = torch.randn(200, 2, 128).to(torch.bfloat16)
    query = formats.dequantise(*formats.quantise(bf16(hadamard(bf16(rotate(q, table)))), "e2m1"))
    assert (deepseek.index_query(q, table).double() != query).double().mean() < 0.001

    unrounded = formats.dequantise(*formats.quantise(hadamard(rotate(rms_norm(pooled, weight, 1e-6), table)), "e2m1"))
    assert (got != unrounded).double().mean() > 0.005


# ---- pooling


@pytest.mark.parametrize("ratio", [4, 128])
def test_pooling_is_the_gated_pooling_in_fp32(ratio: int) -> None:
    """exp, division, product and sum over at most 128 slots in fp32: below 140 * 2^-24 of the largest kv."""
    dim, halves = 16, 2 if ratio == 4 else 1
    kv_score, ape = torch.randn(ratio * 9 + 3, 2 * halves * dim), torch.randn(halves * ratio, dim)
    got = deepseek.pool(kv_score, ape, ratio)
    assert got.dtype == torch.float32 and got.shape == (9, dim)
    exact = compressor.pool(kv_score, ape, ratio)
    assert (got - exact).abs().max() < 140 * 2.0**-24 * kv_score.abs().max()
    assert torch.equal(deepseek.pool(kv_score, ape, ratio, max_bytes=1), got)


def test_a_prompt_shorter_than_a_block_has_no_entry() -> None:
    assert deepseek.pool(torch.randn(3, 64), torch.randn(8, 16), 4).shape == (0, 16)


# ---- scores and selection


def whole_numbers(*shape: int) -> Tensor:
    """Small integers: every fp32 product and sum is exact, so only the declared roundings act."""
    return torch.randint(-6, 7, shape).float()


def test_score_rounds_dot_term_and_sum_to_bf16() -> None:
    q, k, w = whole_numbers(5, 8, 64), whole_numbers(33, 64), whole_numbers(5, 8) / 8 + 1 / 64
    bf16 = formats.round_bf16
    dots = torch.einsum("rhd,ed->rhe", q.double(), k.double())
    terms = bf16(bf16(dots).clamp(min=0) * w.double()[..., None])
    got = deepseek.score(q, k, w)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got.double(), bf16(terms.sum(1)))
    exact = (dots.clamp(min=0) * w.double()[..., None]).sum(1)
    assert (got.double() != bf16(exact)).double().mean() > 0.1


def test_score_equals_the_published_expression() -> None:
    """The einsum, ReLU, product and sum of `model.py` on bf16 tensors, whole."""
    q, k, w = (whole_numbers(*shape).to(torch.bfloat16) for shape in ((5, 8, 64), (33, 64), (5, 8)))
    published = (torch.einsum("bhd,td->bht", q, k).relu() * w.unsqueeze(-1)).sum(1)
    assert torch.equal(deepseek.score(q, k, w), published)
    assert torch.equal(deepseek.score(q, k, w, max_bytes=1), published)


def test_scores_stay_within_their_budget(largest_tensor: Callable[..., Any]) -> None:
    q, k, w = torch.randn(8, 64, 16), torch.randn(4000, 16), torch.randn(8, 64)
    with largest_tensor() as seen:
        deepseek.score(q, k, w, max_bytes=2**20)
    assert 2**17 <= seen.bytes <= 2**20


def test_select_takes_the_best_and_pads() -> None:
    score = torch.tensor([[1.0, 9.0, 3.0, 7.0, 8.0]] * 3)
    got = deepseek.select(score, torch.tensor([4, 2, 0]), 3)
    assert got.dtype == torch.int32
    assert got.tolist() == [[1, 3, 2], [1, 0, -1], [-1, -1, -1]]
    assert deepseek.select(score[:, :2], torch.tensor([2, 2, 1]), 4)[2].tolist() == [0, -1, -1, -1]


def test_select_ranks_scores_as_they_are() -> None:
    """Given another path's fp32 scores it must not round them to bf16 first: 1 + 2^-20 beats 1."""
    score = torch.tensor([[1.0] * 50 + [1 + 2.0**-20]])
    assert deepseek.select(score, torch.tensor([51]), 1).tolist() == [[50]]
