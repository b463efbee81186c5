from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from difftest.reference.config import load_config
from difftest.reference.hadamard import hadamard
from difftest.reference.indexer import (
    head_weight,
    index_key,
    index_query,
    indexer_inputs,
    score,
    score_layer,
    score_magnitude,
    score_magnitude_layer,
    select,
)
from difftest.reference.inputs import LayerInputs
from difftest.reference.norm import rms_norm
from difftest.reference.rope import rope_table, rotate
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

FLASH = load_config("v4-flash")
Normal = Callable[..., Tensor]


def score_by_hand(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    return torch.tensor(
        [
            [sum(float(w[r, h]) * max(0.0, float(q[r, h] @ k[e])) for h in range(q.shape[1])) for e in range(len(k))]
            for r in range(len(q))
        ],
        dtype=torch.float64,
    )


def reorder_bound(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    """Twice n 2^-53 of the sum of absolute products, n = D + H roundings in any order."""
    size = torch.einsum("rhd,ed,rh->re", q.abs(), k.abs(), w.abs())
    return size * (q.shape[1] + q.shape[2]) * 2.0**-52


# ---- keys, queries and weights


def test_key_order_is_norm_rotation_hadamard(normal: Normal) -> None:
    pooled, weight = normal(1, 5, 128), normal(2, 128)
    table = rope_table(FLASH, "csa", torch.arange(5) * 4)
    expected = hadamard(rotate(rms_norm(pooled, weight, 1e-6), table))
    assert torch.equal(index_key(pooled, weight, 1e-6, table), expected)


def test_unquantised_dots_do_not_see_the_hadamard(normal: Normal) -> None:
    """Both sides transformed: dots equal those of the rotated vectors, which makes a one-sided transform visible."""
    table = rope_table(FLASH, "csa", torch.arange(3) * 4)
    key = index_key(normal(1, 3, 128), torch.ones(128), 1e-6, table)
    query = index_query(normal(2, 3, 4, 128), table)
    plain = torch.einsum("rhd,rd->rh", rotate(normal(2, 3, 4, 128), table), rms_norm(hadamard(key), None, 0.0))
    assert torch.allclose(torch.einsum("rhd,rd->rh", query, key), plain, rtol=1e-6)


def test_head_weight_carries_both_factors() -> None:
    weight = torch.tensor([[1.0, -2.0]], dtype=torch.bfloat16)
    assert head_weight(weight, FLASH)[0].tolist() == pytest.approx([8192**-0.5, -2 * 8192**-0.5], rel=1e-15)


def test_a_layer_without_indexer_says_so(make_layer: Callable[..., LayerInputs]) -> None:
    with pytest.raises(ValueError, match="a hca layer has no indexer"):
        indexer_inputs(make_layer("hca"))


# ---- scores


def test_score_is_the_formula(normal: Normal) -> None:
    q, k, w = normal(1, 3, 4, 16), normal(2, 5, 16), normal(3, 3, 4)
    assert ((score(q, k, w) - score_by_hand(q, k, w)).abs() <= reorder_bound(q, k, w)).all()
    assert ((score_magnitude(q, k, w) - score_by_hand(q, k, w.abs())).abs() <= reorder_bound(q, k, w)).all()


def test_relu_comes_before_the_weight() -> None:
    """q.k = 2 and -3 with weights -1 and 1: the score is -2; a ReLU after the weight would give 0."""
    q = torch.tensor([[[2.0], [-3.0]]])
    assert score(q, torch.ones(1, 1), torch.tensor([[-1.0, 1.0]])).tolist() == [[-2.0]]
    assert score_magnitude(q, torch.ones(1, 1), torch.tensor([[-1.0, 1.0]])).tolist() == [[2.0]]


@pytest.mark.parametrize("budget", [1, 5_000, 40_000])
def test_score_in_slices_is_the_same(normal: Normal, budget: int) -> None:
    q, k, w = normal(1, 7, 4, 16), normal(2, 33, 16), normal(3, 7, 4)
    difference = score(q, k, w, max_bytes=budget) - score(q, k, w)
    assert (difference.abs() <= reorder_bound(q, k, w)).all()


def test_empty_scores() -> None:
    assert score(torch.zeros(0, 4, 16), torch.zeros(5, 16), torch.zeros(0, 4)).shape == (0, 5)
    assert score(torch.zeros(2, 4, 16), torch.zeros(0, 16), torch.zeros(2, 4)).shape == (2, 0)


@settings(deadline=None, max_examples=15)
@given(a=st.integers(-30, 30), b=st.integers(-30, 30), c=st.integers(-30, 30), seed=st.integers(0, 2**32))
def test_power_of_two_factors_come_out_exactly(a: int, b: int, c: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    q, k, w = (torch.randn(*shape, generator=generator).double() for shape in ((3, 4, 16), (9, 16), (3, 4)))
    scaled = score(q * 2.0**a, k * 2.0**b, w * 2.0**c)
    assert torch.equal(scaled, score(q, k, w) * 2.0 ** (a + b + c))


@settings(deadline=None, max_examples=15)
@given(order=st.permutations(range(6)), seed=st.integers(0, 2**32))
def test_heads_have_no_order(order: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    q, k, w = (torch.randn(*shape, generator=generator).double() for shape in ((3, 6, 16), (9, 16), (3, 6)))
    difference = score(q[:, order], k, w[:, order]) - score(q, k, w)
    assert (difference.abs() <= reorder_bound(q, k, w)).all()


def layer_tensors(inputs: LayerInputs, normal: Normal) -> tuple[Tensor, Tensor, Tensor]:
    rows = len(inputs.row_position)
    return normal(1, rows, 4, 16), normal(2, inputs.entry_offset[-1], 16), normal(3, rows, 4)


def test_rows_see_their_own_request_up_to_visible(make_layer: Callable[..., LayerInputs], normal: Normal) -> None:
    inputs = make_layer("csa", (90, 41, 3))
    q, k, w = layer_tensors(inputs, normal)
    got, magnitude = score_layer(inputs, q, k, w), score_magnitude_layer(inputs, q, k, w)
    assert got.shape == (len(q), int(inputs.visible.max()))
    for row in range(len(q)):
        request, visible = int(inputs.row_request[row]), int(inputs.visible[row])
        own = k[inputs.entry_offset[request] :][:visible]
        one = slice(row, row + 1)
        bound = reorder_bound(q[one], own, w[one])
        assert ((got[one, :visible] - score_by_hand(q[one], own, w[one])).abs() <= bound).all()
        assert ((magnitude[one, :visible] - score_by_hand(q[one], own, w[one].abs())).abs() <= bound).all()
        assert (got[row, visible:] == -torch.inf).all() and (magnitude[row, visible:] == -torch.inf).all()


def test_nan_past_visible_stays_there(make_layer: Callable[..., LayerInputs], normal: Normal) -> None:
    """The last entry is NaN; only rows that see it may notice."""
    inputs = make_layer("csa", (90,), mode="decode", decode_tokens=6)
    q, k, w = layer_tensors(inputs, normal)
    k[-1] = torch.nan
    got = score_layer(inputs, q, k, w)
    assert torch.equal(got.isnan().any(1), inputs.visible == len(k))
    assert (inputs.visible < len(k)).any()


def test_a_layer_without_entries_scores_nothing(make_layer: Callable[..., LayerInputs], normal: Normal) -> None:
    inputs = make_layer("csa", (3, 2))
    got = score_layer(inputs, *layer_tensors(inputs, normal))
    assert got.shape == (len(inputs.row_position), 0)
    assert (select(got, inputs.visible, 4) == -1).all()


# ---- selection


def chosen(score: list[list[float]], visible: list[int], k: int) -> list[list[int]]:
    return select(torch.tensor(score, dtype=torch.float64), torch.tensor(visible), k).tolist()


def test_selects_the_best_in_entry_order() -> None:
    assert chosen([[1, 9, 3, 7]], [4], 2) == [[1, 3]]
    assert chosen([[1, 9, 3, 7]], [3], 2) == [[1, 2]]


def test_at_most_k_candidates_are_all_selected() -> None:
    """Also those at -inf, which is a legal score of a visible entry."""
    inf = float("inf")
    assert chosen([[-inf, 2, 9], [0, 0, 0]], [2, 0], 4) == [[0, 1, -1, -1], [-1] * 4]


def test_ties_at_the_cut_go_to_the_lower_entry() -> None:
    assert chosen([[5, 1, 5, 5, 7]], [5], 3) == [[0, 2, 4]]
    assert chosen([[0.0] * 6], [6], 2) == [[0, 1]]
    assert chosen([[0.0, -0.0, 0.0]], [3], 2) == [[0, 1]]


def test_nan_is_never_selected() -> None:
    nan = float("nan")
    assert chosen([[nan, 1, nan, 2, 3]], [5], 2) == [[3, 4]]
    assert chosen([[nan, 1, nan]], [3], 3) == [[1, -1, -1]]


def test_columns_past_visible_do_not_count_whatever_they_hold() -> None:
    nan, inf = float("nan"), float("inf")
    assert chosen([[1, 2, inf, nan]], [2], 1) == [[1]]


def test_selecting_nothing() -> None:
    assert select(torch.zeros(2, 5), torch.tensor([5, 5]), 0).shape == (2, 0)


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 2**32), levels=st.integers(1, 60), k=st.integers(1, 40))
def test_selections_are_valid_nested_and_sliced_alike(seed: int, levels: int, k: int) -> None:
    """With few score levels most cuts are ties; k nests in k + 1, and nothing unselected beats a selected one."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(levels, (6, 30), generator=generator).double()
    visible = torch.randint(0, 31, (6,), generator=generator)
    got, more = select(scores, visible, k), select(scores, visible, k + 1)
    assert got.dtype == torch.int32
    assert torch.equal(select(scores, visible, k, max_bytes=1), got)
    for row in range(6):
        picked, count = got[row][got[row] >= 0].tolist(), int(visible[row])
        assert len(picked) == min(k, count) and picked == sorted(set(picked))
        assert got[row, len(picked) :].tolist() == [-1] * (k - len(picked))
        assert set(picked) <= set(more[row].tolist()) and set(picked) <= set(range(count))
        left = [float(scores[row, e]) for e in range(count) if e not in picked]
        assert not left or not picked or max(left) <= min(float(scores[row, e]) for e in picked)


@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 2**32), power=st.integers(-20, 20))
def test_selection_ignores_positive_factors(seed: int, power: int) -> None:
    scores = torch.randn(4, 50, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    visible = torch.tensor([50, 33, 8, 1])
    assert torch.equal(select(scores, visible, 9), select(scores * 2.0**power, visible, 9))


def test_requests_have_no_order(
    make_layer: Callable[..., LayerInputs], reorder_requests: Callable[..., LayerInputs], normal: Normal
) -> None:
    inputs = make_layer("csa", (90, 41, 57))
    moved = reorder_requests(inputs, (2, 0, 1))
    q, k, w = layer_tensors(inputs, normal)
    offset = inputs.entry_offset
    packed = torch.cat([k[offset[request] : offset[request + 1]] for request in (2, 0, 1)])
    assert torch.equal(score_layer(moved, q, packed, w), score_layer(inputs, q, k, w))
    assert moved.lengths == (57, 90, 41) and replace(moved, lengths=inputs.lengths).entry_offset == offset


def test_scores_stay_within_their_budget(normal: Normal, largest_tensor: Callable[..., Any]) -> None:
    """Whole, 8 x 64 x 4,000 dot products take 16 MB; the result (256 kB) and the operands fit the budget."""
    q, k, w = normal(1, 8, 64, 16), normal(2, 4000, 16), normal(3, 8, 64)
    with largest_tensor() as seen:
        score(q, k, w, max_bytes=2**20)
    assert 2**18 <= seen.bytes <= 2**20
    with largest_tensor() as seen:
        score(q, k, w)
    assert seen.bytes == 8 * 64 * 4000 * 8
