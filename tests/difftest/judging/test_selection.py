"""Selection rules: each is tripped by its own fault, ties are free, and unexercised rows count for nothing."""

import math

import pytest
import torch
from torch import Tensor

from difftest.isolated import check_isolated
from difftest.selection import Selection, cut, exactness, kth_score, recall, structure, value_recall
from difftest.trace import Trace

VISIBLE = torch.tensor([9, 3, 0, 9])
K = 4


def scores() -> Tensor:
    score = torch.tensor(
        [
            [0.1, 0.9, 0.3, 0.8, 0.2, 0.7, 0.6, 0.0, 0.5],
            [0.1, 0.2, 0.3, -math.inf, -math.inf, -math.inf, -math.inf, -math.inf, -math.inf],
            [-math.inf] * 9,
            [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 2.0],
        ]
    )
    return score


def right() -> Tensor:
    return torch.tensor([[6, 3, 1, 5], [0, 1, 2, -1], [-1, -1, -1, -1], [8, 5, 0, 3]], dtype=torch.int32)


def rules(chosen: Tensor, score: Tensor | None = None, **slots: Tensor) -> list[str]:
    selection = Selection(chosen, scores() if score is None else score, VISIBLE)
    return [finding.rule for finding in structure(selection, **slots)]


def changed(row: int, values: list[int]) -> Tensor:
    chosen = right()
    chosen[row] = torch.tensor(values)
    return chosen


def test_right_selection_passes_in_any_order():
    assert rules(right()) == []
    assert rules(changed(0, [1, 3, 5, 6])) == []
    assert exactness(Selection(right(), scores(), VISIBLE)).findings == []


@pytest.mark.parametrize(
    ("row", "values", "want"),
    [
        (0, [6, 3, 1, 9], ["range"]),
        (0, [6, 3, 1, -2], ["range", "count"]),
        (1, [0, 1, 2, 3], ["range", "count"]),
        (0, [6, 3, 1, 1], ["unique"]),
        (1, [0, -1, 1, 2], ["padding"]),
        (0, [6, 3, 1, -1], ["count"]),
        (1, [0, 1, -1, -1], ["count"]),
        (2, [0, -1, -1, -1], ["range", "count"]),
    ],
)
def test_structure(row, values, want):
    assert rules(changed(row, values)) == want


def test_selected_nan():
    score = scores()
    score[0, 3] = math.nan
    assert rules(right(), score) == ["nan_selected"]


def test_pool_slots_must_be_those_of_the_entries():
    table = torch.arange(9).expand(4, 9) + 64
    slots = torch.where(right() >= 0, right() + 64, -1)
    assert rules(right(), slots=slots, pool_slots=table) == []
    slots[3, 2] += 1
    assert rules(right(), slots=slots, pool_slots=table) == ["slots"]


def test_exactness_names_both_entries():
    found = exactness(Selection(changed(0, [6, 3, 1, 8]), scores(), VISIBLE))
    assert found.wrong_rows.tolist() == [True, False, False, False]
    assert found.largest_gap == pytest.approx(0.2)
    assert found.findings[0].where == {"row": 0, "entry": 5, "selected": 8}


def test_ties_are_free_and_nan_ranks_last():
    assert exactness(Selection(changed(3, [8, 1, 2, 4]), scores(), VISIBLE)).findings == []
    assert exactness(Selection(changed(3, [1, 2, 4, 5]), scores(), VISIBLE)).findings != []
    score = scores()
    score[0, 4] = math.nan
    assert exactness(Selection(right(), score, VISIBLE)).findings == []


def test_scores_one_ulp_apart_are_told_apart():
    score = scores()
    score[3, 6] = torch.nextafter(score[3, 0], torch.tensor(2.0))
    found = exactness(Selection(right(), score, VISIBLE))
    assert found.findings
    high, low = found.findings[0].message.split("score ")[1].split(" ")[0], found.findings[0].message.split("with ")[1]
    assert high != low.split(";")[0]


def test_recall_is_of_sets_and_value_recall_lets_ties_pass():
    other = changed(3, [8, 1, 2, 4])
    assert recall(other, right(), 9).tolist() == [1.0, 1.0, 1.0, 0.25]
    assert value_recall(other, scores(), VISIBLE).tolist() == [1.0, 1.0, 1.0, 1.0]
    assert value_recall(changed(0, [6, 3, 1, 8]), scores(), VISIBLE)[0] == 0.75
    assert kth_score(scores(), VISIBLE, K).tolist() == pytest.approx([0.6, -math.inf, -math.inf, 1.0])


def test_cut():
    rows = torch.tensor([0, 3])
    found = cut(scores()[rows], VISIBLE[rows], K)
    assert found.kth.tolist() == pytest.approx([0.6, 1.0])
    assert found.next.tolist() == pytest.approx([0.5, 1.0])
    assert found.equal.tolist() == [1, 6]
    assert found.tied.tolist() == [False, True]


def test_record_counts_exercised_rows(bench):
    record = bench.check("topk", "fp32")
    visible = bench.layer().visible
    assert record.metrics["rows_exercised"] == int((visible > 16).sum())
    assert record.skipped == ""


def test_unexercised_selection_is_neither_pass_nor_fail(bench):
    inputs = bench.inputs(lengths=(63, 40))
    trace = bench.model(bench.declarations["fp32"]).run(inputs, "small")
    record = check_isolated("topk", inputs, trace, bench.declarations["fp32"])
    assert record.skipped == "selection not exercised"
    assert record.facts["why"].startswith("the longest row has ")
    trace["topk"]["value"][0, 0] = 60
    assert check_isolated("topk", inputs, trace, bench.declarations["fp32"]).skipped == ""


@pytest.mark.parametrize(
    ("fault", "rule"),
    [
        (lambda t: t.index_copy(1, torch.tensor([0]), t[:, 1:2]), "unique"),
        (lambda t: torch.where(t == t.amax(1, keepdim=True), 0, t), "unique"),
        (lambda t: t + 40, "range"),
        (lambda t: torch.cat((t[:, 1:], torch.full_like(t[:, :1], -1)), 1), "count"),
    ],
)
def test_faults_in_topk(bench, fault, rule):
    record = bench.check("topk", "fp32", topk=fault)
    assert rule in {finding.rule for finding in record.findings}


def test_not_the_best_entries(bench):
    def second_best(chosen: Tensor) -> Tensor:
        """One selected entry of an exercised row is replaced by one that was left out."""
        chosen, visible = chosen.clone(), bench.layer().visible
        row = int((visible > 16).nonzero()[0])
        left = set(range(int(visible[row]))) - set(chosen[row].tolist())
        chosen[row, 0] = left.pop()
        return chosen

    record = bench.check("topk", "fp32", topk=second_best)
    assert [finding.rule for finding in record.findings] == ["order"]
    assert record.metrics["deviation"] == 1
    assert record.metrics["excess"] == math.inf


def test_empty_trace_of_scores():
    empty = Selection(torch.full((2, 4), -1), torch.empty(2, 0), torch.zeros(2, dtype=torch.int64))
    assert structure(empty) == []
    assert exactness(empty).findings == []
    assert isinstance(Trace("a", 2, "b").stages, dict)
