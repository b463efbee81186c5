"""Rows judged together are judged as they are alone."""

import math
from dataclasses import fields, replace

import pytest
import torch

from difftest import attention_check
from difftest.attention_check import row_balls
from difftest.ball import SECOND_ORDER, Ball
from difftest.bounds_attention import SPARSE, AttentionBall, attention_ball
from difftest.isolated import check_isolated
from difftest.trace import Trace


def parts(ball):
    """Every tensor of an attention ball by name."""
    for field in fields(ball):
        value = getattr(ball, field.name)
        yield from (
            [(field.name, value.mid), (f"{field.name} rad", value.rad)]
            if isinstance(value, Ball)
            else [(field.name, value)]
        )


@pytest.mark.parametrize("declares", ["fp8", "bf16", "fp32"])
@pytest.mark.parametrize("kind", ["csa", "hca", "swa"])
def test_a_batch_is_its_rows(bench, monkeypatch, kind, declares):
    """Rows with different numbers of slots share a batch, padded; so do rows with many, few and no unsure queries."""
    inputs, trace, declaration = bench.layer(kind), bench.clean(declares, kind), bench.declarations[declares]
    together = list(row_balls(inputs, trace, declaration))
    monkeypatch.setitem(attention_check.BATCH_ROWS, "cpu", 1)
    alone = [ball for _, ball in row_balls(inputs, trace, declaration)]
    assert [row for rows, _ in together for row in rows] == list(range(len(alone)))
    assert len(together) < len(alone)
    for rows, ball in together:
        for place, row in enumerate(rows):
            for (name, batched), (_, single) in zip(parts(ball), parts(alone[row]), strict=True):
                assert torch.allclose(batched[place], single[0], rtol=1e-5, atol=0), (name, row)


class Rows:
    """Three rows of 5, 9 and 7 slots, whose queries have no, some and (of one head) too many unsure elements."""

    heads, width, counts = 3, 2 * SPARSE, torch.tensor([5, 9, 7])

    def __init__(self) -> None:
        make = torch.Generator().manual_seed(2)
        self.query, self.values = (
            torch.randn(3, count, self.width, generator=make, dtype=torch.float64) for count in (self.heads, 9)
        )
        self.values[torch.arange(9) >= self.counts[:, None]] = 0.0
        self.sink = torch.randn(self.heads, generator=make, dtype=torch.float64)
        self.rad = torch.zeros_like(self.query)
        self.rad[1, 0, [3, 70]], self.rad[1, 2, 5], self.rad[2, 0, 4], self.rad[2, 1] = 1e-3, 2e-3, 4e-3, 1e-3

    def ball(self, declares, rows=slice(0, 3), slots=9, rad=None) -> AttentionBall:
        query = Ball(self.query[rows], (self.rad if rad is None else rad)[rows])
        values, count = self.values[rows, :slots], self.counts[rows]
        return attention_ball(query, values, count, self.sink, self.width**-0.5, declares)

    def out(self, query, row: int) -> torch.Tensor:
        values = self.values[row, : self.counts[row]]
        weight = (query @ values.T * self.width**-0.5).exp()
        return weight @ values / (weight.sum(-1) + self.sink.exp())[:, None]


@pytest.mark.parametrize("declares", ["fp8", "bf16", "fp32"])
def test_padded_rows_are_as_alone(bench, declares):
    rows, declaration = Rows(), bench.declarations[declares]
    together = rows.ball(declaration)
    for row, count in enumerate(Rows.counts.tolist()):
        alone = rows.ball(declaration, slice(row, row + 1), count)
        for (name, batched), (_, single) in zip(parts(together), parts(alone), strict=True):
            assert torch.allclose(batched[row], single[0], rtol=1e-5, atol=0), (name, row)
        assert torch.allclose(together.out.mid[row], rows.out(rows.query[row], row), rtol=1e-12, atol=1e-15)


def test_unsure_query_elements_widen_the_ball_by_what_they_do(bench):
    """By the change of the output when one is moved by its radius, of all of a head's together; a head with too many by
    more than that."""
    rows = Rows()
    wider = rows.ball(bench.declarations["fp32"]).out.rad
    wider = wider - rows.ball(bench.declarations["fp32"], rad=torch.zeros_like(rows.rad)).out.rad
    moved = torch.zeros_like(wider)
    for row, head, dim in rows.rad.nonzero().tolist():
        step = torch.zeros_like(rows.query[row])
        step[head, dim] = rows.rad[row, head, dim]
        moved[row] += (rows.out(rows.query[row] + step, row) - rows.out(rows.query[row] - step, row)).abs() / 2
    assert bool((wider[2, 1] > SECOND_ORDER * moved[2, 1]).all())
    wider[2, 1] = moved[2, 1] = 0.0
    assert torch.allclose(wider, SECOND_ORDER * moved, rtol=1e-3, atol=1e-8)
    assert moved.amax(-1).gt(1e-5).tolist() == [[False] * 3, [True, False, True], [True, False, False]]


def test_records_do_not_depend_on_the_batch(bench, monkeypatch):
    """Three rows off by as much: the worst is named, and so is the first row without keys that holds something."""
    inputs, clean = bench.layer("swa"), bench.clean("fp8", "swa")
    index = inputs.window_index.clone()
    index[[2, 6, 7]] = -1
    value = clean["attention"]["value"].clone()
    value[[1, 4, 5], 1, 5] = math.pi
    attention = {"value": value, "lse": clean["attention"]["lse"]}
    trace = Trace("small", inputs.layer, "model", {**clean.stages, "attention": attention})
    records = []
    for size in (1, 3, 64):
        monkeypatch.setitem(attention_check.BATCH_ROWS, "cpu", size)
        records.append(
            check_isolated("attention", replace(inputs, window_index=index), trace, bench.declarations["fp8"])
        )
    first = records[0]
    assert first.worst.where == {"row": 1, "head": 1, "dim": 5}
    assert [finding.where["row"] for finding in first.findings] == [2, 2, 6, 6, 7, 7]
    for record in records[1:]:
        assert record.findings == first.findings
        assert record.worst.where == first.worst.where
        assert record.facts == first.facts
        assert record.metrics == pytest.approx(first.metrics, rel=1e-6)
        assert record.bounds == pytest.approx(first.bounds, rel=1e-6)


def test_neighbours_share_a_batch_unless_their_lengths_are_far_apart():
    counts = [0, 0, 3, 5, 6, 7, 3, 600, 640, 640, 640, 640, 0]
    parts = [list(range(*part.indices(len(counts)))) for part in attention_check._batches(counts, 3)]
    assert parts == [[0, 1], [2, 3, 4], [5], [6], [7, 8, 9], [10, 11], [12]]
    assert list(attention_check._batches([], 3)) == []


def test_long_rows_are_judged_in_smaller_batches(bench):
    inputs = bench.layer()
    assert attention_check.batch_rows(inputs, 40) == attention_check.BATCH_ROWS["cpu"]
    assert attention_check.batch_rows(inputs, 1 << 30) == 1
