"""Families do what they say, measured with the oracle."""

import pytest
import torch
from difftest.cases.families import FAMILIES, apply_family
from difftest.reference import oracle
from difftest.reference.indexer import score_magnitude_layer
from difftest.reference.inputs import LayerInputs
from torch import Tensor

from .conftest import LAYER, layer_of

LENGTHS = (2999, 2310)
TOPK = 512
GPU_FREE = sorted(set(FAMILIES) - {"dyadic"})


def scores(inputs: LayerInputs) -> Tensor:
    keys = oracle.index_k(inputs, oracle.compressed(inputs))
    return oracle.score(inputs, keys, oracle.index_q(inputs), oracle.head_weight(inputs))


def best(row: Tensor, visible: int) -> Tensor:
    return row[:visible].sort(descending=True).values


def exercised(inputs: LayerInputs) -> list[tuple[int, int]]:
    """(row, visible) of rows that see more than TOPK entries; there must be some."""
    found = [(row, visible) for row, visible in enumerate(inputs.visible.tolist()) if visible > TOPK]
    assert len(found) >= 4
    return found


@pytest.mark.parametrize("kind", LAYER)
@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"non-finite"}))
def test_every_family_serves_every_layer_kind_and_stays_finite(family: str, kind: str) -> None:
    inputs = layer_of(family, (300, 9), kind, rows=6)
    assert inputs.window_kv.isfinite().all() and inputs.attn_query.isfinite().all()
    for compressor in (inputs.index, inputs.main):
        assert compressor is None or compressor.kv_score.isfinite().all()


def test_outlier_channels_stand_out_in_keys_queries_and_latents() -> None:
    inputs = layer_of("outlier-heavy", (300,), params={"channels": 3, "factor": 20.0})
    assert inputs.index is not None and inputs.main is not None and inputs.index_query is not None
    for tensor, width in (
        (inputs.index.kv_score[:, 128:256], 128),
        (inputs.main.kv_score[:, :512], 512),
        (inputs.window_kv.float(), 512),
        (inputs.index_query.float().flatten(0, 1), 128),
    ):
        spread = tensor.std(0)
        assert len(spread) == width
        assert (spread > 10).sum() == 3 and (spread < 2).sum() == width - 3


def test_heavy_tails() -> None:
    inputs = layer_of("heavy-tailed", (300,))
    assert inputs.index is not None and inputs.index_query is not None
    for tensor in (inputs.index.kv_score, inputs.index_query.float(), inputs.window_kv.float()):
        assert tensor.abs().max() > 12 * tensor.abs().median(), "a normal sample reaches about 8 medians"


def test_near_duplicates_leave_little_between_neighbours_at_the_cut() -> None:
    inputs = layer_of("near-duplicate", LENGTHS)
    plain = layer_of("gaussian", LENGTHS)
    keys = oracle.index_k(inputs, oracle.compressed(inputs))
    first = keys[: inputs.entries[0]]
    near = torch.cdist(first, first).fill_diagonal_(torch.inf).min(1).values
    assert near.max() < 0.02 * 128**0.5 * 2, "every key has a copy at a distance of about 2^-7 sqrt(2 D)"
    clustered, spread = scores(inputs), scores(plain)
    for row, visible in exercised(inputs):
        within = [
            float(
                (table[row, :visible] - best(table[row], visible)[TOPK - 1]).abs().median() / table[row, :visible].std()
            )
            for table in (clustered, spread)
        ]
        around = ((clustered[row, :visible] - best(clustered[row], visible)[TOPK - 1]).abs() < 0.05).sum()
        assert around > visible // 16, within


def test_relu_plateau_has_a_hundred_positive_scores_and_zeros() -> None:
    inputs = layer_of("relu-plateau", LENGTHS, params={"positive": 100})
    table = scores(inputs)
    for row, visible in exercised(inputs):
        seen = table[row, :visible]
        positive = int((seen > 0).sum())
        assert positive <= 100 and positive + int((seen == 0).sum()) == visible
        assert positive > 0.6 * 100 * visible / inputs.entries[int(inputs.row_request[row])]
        assert best(seen, visible)[TOPK - 1] == 0, "the cut lies on the plateau"


@pytest.mark.parametrize("spread, width", [(0.0, 1e-6), (2.0**-9, 2e-2)])
def test_tie_band_lies_around_the_cut(spread: float, width: float) -> None:
    inputs = layer_of("tie-band", LENGTHS, params={"spread": spread})
    table = scores(inputs)
    for row, visible in exercised(inputs):
        if visible < 1.12 * TOPK:  # fewer entries than the band needs, see the family
            continue
        ordered = best(table[row], visible)
        cut = ordered[TOPK - 1]
        band = ((ordered - cut).abs() < width * ordered[0]).sum()
        assert band > 0.3 * visible
        assert (ordered[TOPK - 60 : TOPK + 5] - cut).abs().max() < width * ordered[0], "on both sides of the cut"
        assert ordered[0] > 1.1 * cut and ordered[-1] < 0.7 * cut, "clearly better and clearly worse entries exist"


def test_cancellation_leaves_a_small_part_of_large_terms() -> None:
    inputs = layer_of("cancellation", LENGTHS)
    keys = oracle.index_k(inputs, oracle.compressed(inputs))
    size = score_magnitude_layer(inputs, oracle.index_q(inputs), keys, oracle.head_weight(inputs))
    table = scores(inputs)
    row, visible = exercised(inputs)[0]
    share = table[row, :visible].abs().median() / size[row, :visible].median()
    plain = layer_of("gaussian", LENGTHS)
    plain_size = score_magnitude_layer(
        plain, oracle.index_q(plain), oracle.index_k(plain, oracle.compressed(plain)), oracle.head_weight(plain)
    )
    assert share < 0.02
    assert scores(plain)[row, :visible].abs().median() / plain_size[row, :visible].median() > 0.05
    assert size[row, :visible].median() > 8 * plain_size[row, :visible].median()


def test_page_edges_hold_the_best_entries() -> None:
    inputs = layer_of("page-edges", LENGTHS)
    table = scores(inputs)
    for row, visible in enumerate(inputs.visible.tolist()):
        entry = torch.arange(visible)
        edge = (entry % 64 == 0) | (entry % 64 == 63) | (entry == visible - 1)
        better = (table[row, :visible] > table[row, :visible][edge].min()).sum()
        others = int(
            (inputs.row_request == inputs.row_request[row]).sum()
        )  # the last entries of other rows are good too
        assert better <= edge.sum() + others
        assert edge.sum() <= better + 1


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("tensor", ["index_query", "index.kv_score", "attn_sink"])
def test_non_finite_puts_exactly_that_there(tensor: str, value: str) -> None:
    inputs = layer_of("non-finite", (300,), params={"tensor": tensor, "value": value, "count": 3})
    owner, _, part = tensor.rpartition(".")
    found = getattr(getattr(inputs, owner) if owner else inputs, part)
    bad = found[~found.isfinite()].float()
    assert len(bad) == 3 and all(str(number) == value for number in bad.tolist())


def test_non_finite_refuses_what_is_no_tensor() -> None:
    with pytest.raises(ValueError, match="tensor 'page_table' is no floating-point input"):
        layer_of("non-finite", (300,), params={"tensor": "page_table"})


def test_apply_family_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"did you mean .*tie-band"):
        apply_family("tie-bend", None, None, {})  # type: ignore[arg-type]
