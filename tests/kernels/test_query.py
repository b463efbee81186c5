"""The index query: rotated, transformed, rounded once."""

from collections.abc import Callable

import pytest
import torch
from difftest.kernels.query import decode_e4m3, head_weight, index_query, index_query_fp8, prepare_query
from difftest.kernels.rope import rope_table
from difftest.reference.config import load_config
from difftest.reference.formats import encode_e4m3fn
from difftest.reference.indexer import head_weight as exact_head_weight
from difftest.reference.indexer import index_query as exact_query
from difftest.reference.rope import rope_table as published
from torch import Tensor

FP32_UNIT = 2.0**-24
FLASH = load_config("v4-flash")
QUERY_UNITS = 2 * 12
"""Rotation (3 units), 7 butterfly stages and the scale stay under 12 units of the sum of magnitudes over sqrt(128); a
rotation mixes the two dims of a pair, hence the factor 2."""


def drawn(rows: int, heads: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    """Queries bf16, positions and the table of all positions below 4096."""
    query = (torch.randn(rows, heads, 128) * torch.exp2(torch.randint(-9, 9, (rows, heads, 1)).float())).bfloat16()
    return query, torch.randint(1, 4096, (rows,)), rope_table(torch.arange(4096))


@pytest.mark.parametrize(("rows", "heads"), [(1, 64), (7, 64), (5, 3)])
def test_equals_the_reference(device: str, rows: int, heads: int, assert_rounds: Callable[..., None]) -> None:
    query, positions, table = drawn(rows, heads)
    got = index_query(query.to(device), table.to(device), positions.to(device))
    exact = exact_query(query, published(FLASH, "csa", positions))
    rad = QUERY_UNITS * FP32_UNIT * query.double().abs().sum(-1, keepdim=True) * 128**-0.5
    assert_rounds(got, exact, rad)


def test_fp8_codes_and_scale(device: str) -> None:
    """Codes differ from the exact ones only where the value is within the radius of a tie: rarely, and then by one."""
    query, positions, table = drawn(9)
    codes, scale = index_query_fp8(query.to(device), table.to(device), positions.to(device, torch.int32))
    exact = exact_query(query, published(FLASH, "csa", positions))
    want_scale = exact.abs().amax(-1).clamp_min(1e-4) / 448
    assert ((scale.cpu() - want_scale).abs() / want_scale).max() < (QUERY_UNITS * 128**0.5 + 2) * FP32_UNIT
    want = encode_e4m3fn(exact / want_scale[..., None])
    distance = (codes.cpu().to(torch.int16) - want.to(torch.int16)).abs()
    assert distance.max() <= 1
    assert (distance == 0).double().mean() > 0.9999
    assert torch.equal(decode_e4m3(codes).float(), codes.view(torch.float8_e4m3fn).float())


def test_small_and_zero_queries_keep_the_floor(device: str) -> None:
    query = torch.zeros(2, 64, 128, dtype=torch.bfloat16, device=device)
    query[1] = 1e-8
    table = rope_table(torch.arange(4)).to(device)
    codes, scale = index_query_fp8(query, table, torch.tensor([1, 2], device=device))
    assert torch.equal(scale, torch.full_like(scale, torch.tensor(1e-4, dtype=torch.float32).item()) / 448)
    assert (codes[0] & 0x7F == 0).all()


def test_head_weight() -> None:
    weight = torch.randn(11, 64).bfloat16()
    exact = exact_head_weight(weight, FLASH)
    assert ((head_weight(weight) - exact).abs() <= 2 * FP32_UNIT * exact.abs()).all()


def test_weights_are_scaled_in_the_same_kernel(device: str) -> None:
    query, positions, table = drawn(5)
    weight = torch.randn(5, 64).bfloat16()
    got, scaled = prepare_query(query.to(device), weight.to(device), table.to(device), positions.to(device))
    assert scaled is not None and torch.equal(scaled.cpu(), head_weight(weight))
    assert torch.equal(got, index_query(query.to(device), table.to(device), positions.to(device)))
    with pytest.raises(ValueError, match="weight is"):
        prepare_query(query, weight.float(), table, positions)


def test_no_rows_and_refused_operands() -> None:
    query, positions, table = drawn(2)
    assert index_query(query[:0], table, positions[:0]).shape == (0, 64, 128)
    with pytest.raises(ValueError, match="query is"):
        index_query(query.float(), table, positions)
    with pytest.raises(ValueError, match="positions is"):
        index_query(query, table, positions[:1])
