"""What must not change a layer's results: how tokens arrive, where pages lie, who else is in the batch."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from difftest.reference.inputs import CompressorInputs, LayerInputs, Span, Step
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from difftest.paths.base import get_path
from difftest.trace import Trace

from .small import SMALL, small_inputs

PATHS = ("oracle", "sglang-fp8-model", "bf16-k")
SEEDS = st.integers(0, 1000)
EPS32 = 2.0**-23

few = settings(deadline=None, max_examples=3, derandomize=True, phases=(Phase.explicit, Phase.generate))


def run(name: str, inputs: LayerInputs) -> Trace:
    torch.set_num_threads(1)
    return get_path(name).run(inputs, "property")


def sets(picks: Tensor) -> list[set[int]]:
    return [set(row) - {-1} for row in picks.tolist()]


def close(got: Tensor, want: Tensor, scale: float = 64.0) -> None:
    """Equal up to fp32 sums in another order: 512 terms at most, which add up to `scale` times the largest result."""
    finite = want.isfinite()
    assert torch.equal(finite, got.isfinite())
    limit = 512 * EPS32 * scale * float(want[finite].abs().max())
    assert float((got[finite] - want[finite]).abs().max()) <= limit


def same(got: Trace, want: Trace) -> None:
    """Stored tensors bit for bit, selections as sets, sums up to their order."""
    for stage in ("index_k", "index_q", "head_weight"):
        assert torch.equal(got.value(stage), want.value(stage)), stage
    close(got.value("score"), want.value("score"))
    assert sets(got.value("topk")) == sets(want.value("topk"))
    assert torch.equal(got["kv"]["window"], want["kv"]["window"])
    assert torch.equal(got["kv"]["compressed"], want["kv"]["compressed"])
    close(got.value("attention"), want.value("attention"))


def steps_of(lengths: tuple[int, ...], chunks: list[int]) -> tuple[Step, ...]:
    """Every request in chunks of these sizes, in turn, until all its tokens have come."""
    edges = []
    for length in lengths:
        cuts = [0]
        while cuts[-1] < length:
            cuts.append(min(length, cuts[-1] + chunks[(len(cuts) - 1) % len(chunks)]))
        edges.append(list(pairwise(cuts)))
    return tuple(
        tuple(Span(request, *spans[number]) for request, spans in enumerate(edges) if number < len(spans))
        for number in range(max(map(len, edges)))
    )


def arriving(inputs: LayerInputs, steps: tuple[Step, ...]) -> LayerInputs:
    """The same tokens in other steps: rows change their order only, since rows are listed as they arrive."""
    arrival = {
        (span.request, token): (number, span.request, token)
        for number, step in enumerate(steps)
        for span in step
        for token in range(span.start, span.stop)
    }
    rows = list(zip(inputs.row_request.tolist(), inputs.row_position.tolist(), strict=True))
    order = torch.tensor(sorted(range(len(rows)), key=lambda row: arrival[rows[row]]))
    assert inputs.index_query is not None and inputs.index_weight is not None
    return replace(
        inputs,
        steps=steps,
        row_request=inputs.row_request[order],
        row_position=inputs.row_position[order],
        window_index=inputs.window_index[order],
        index_query=inputs.index_query[order],
        index_weight=inputs.index_weight[order],
        attn_query=inputs.attn_query[order],
    )


def row_order(inputs: LayerInputs) -> Tensor:
    return (inputs.row_request * 10**6 + inputs.row_position).argsort()


def in_order(trace: Trace, inputs: LayerInputs) -> Trace:
    """The trace with its rows sorted by request and position."""
    order = row_order(inputs)
    stages = {stage: dict(parts) for stage, parts in trace.stages.items()}
    for stage in ("index_q", "head_weight", "score", "topk", "attention"):
        stages[stage] = {name: tensor[order] for name, tensor in stages[stage].items()}
    return replace(trace, stages=stages)


@pytest.mark.parametrize("name", PATHS)
@few
@given(seed=SEEDS, chunks=st.lists(st.integers(20, 90), min_size=1, max_size=3))
def test_chunked_is_whole(name: str, seed: int, chunks: list[int]) -> None:
    whole = small_inputs(seed)
    arrived = arriving(whole, steps_of(whole.lengths, chunks))
    same(in_order(run(name, arrived), arrived), in_order(run(name, whole), whole))


@pytest.mark.parametrize("name", PATHS)
def test_decode_is_whole(name: str) -> None:
    """Every token in a step of its own."""
    whole = small_inputs(7, lengths=(73, 70), rows=4, overrides={**SMALL, "index_topk": 8})
    arrived = arriving(whole, steps_of(whole.lengths, [1]))
    same(in_order(run(name, arrived), arrived), in_order(run(name, whole), whole))


@pytest.mark.parametrize("name", PATHS)
@few
@given(seed=SEEDS, data=st.data())
def test_pages_may_lie_anywhere(name: str, seed: int, data: st.DataObject) -> None:
    inputs = small_inputs(seed, lengths=(530, 290))
    other = torch.tensor(data.draw(st.permutations(range(inputs.num_pages))))
    table = torch.where(inputs.page_table < 0, -1, other[inputs.page_table.clamp(min=0)].to(inputs.page_table.dtype))
    got, want = run(name, replace(inputs, page_table=table)), run(name, inputs)
    for stage in want.stages:
        assert torch.equal(got.value(stage), want.value(stage)), stage


def swapped(inputs: LayerInputs) -> LayerInputs:
    """The same layer with its two requests in the other order."""
    tokens, entries = inputs.token_offset, inputs.entry_offset
    assert len(inputs.lengths) == 2 and inputs.index is not None and inputs.main is not None

    def turn(part: CompressorInputs) -> CompressorInputs:
        return replace(part, kv_score=torch.cat((part.kv_score[tokens[1] :], part.kv_score[: tokens[1]])))

    assert entries[0] == 0 and not any(inputs.prefix_entries)
    return replace(
        inputs,
        lengths=inputs.lengths[::-1],
        steps=tuple(tuple(replace(span, request=1 - span.request) for span in step) for step in inputs.steps),
        row_request=1 - inputs.row_request,
        window_request=1 - inputs.window_request,
        page_table=inputs.page_table.flip(0),
        index=turn(inputs.index),
        main=turn(inputs.main),
    )


@pytest.mark.parametrize("name", PATHS)
@few
@given(seed=SEEDS)
def test_requests_may_change_places(name: str, seed: int) -> None:
    inputs = small_inputs(seed)
    got, want = run(name, swapped(inputs)), run(name, inputs)
    first = inputs.entries[0]
    for stage, part in (("index_k", "value"), ("kv", "compressed")):
        there = got[stage][part]
        got.stages[stage] = {**got[stage], part: torch.cat((there[-first:], there[:-first]))}
    same(got, want)


@pytest.mark.parametrize("name", PATHS)
@few
@given(seed=SEEDS, data=st.data())
def test_heads_may_change_places(name: str, seed: int, data: st.DataObject) -> None:
    """Index heads only meet in the sum; attention heads never meet."""
    inputs = small_inputs(seed)
    assert inputs.index_query is not None and inputs.index_weight is not None
    own = torch.tensor(data.draw(st.permutations(range(8))))
    attn = torch.tensor(data.draw(st.permutations(range(4))))
    turned = replace(
        inputs,
        index_query=inputs.index_query[:, own],
        index_weight=inputs.index_weight[:, own],
        attn_query=inputs.attn_query[:, attn],
        attn_sink=inputs.attn_sink[attn],
    )
    got, want = run(name, turned), run(name, inputs)
    close(got.value("score"), want.value("score"))
    assert sets(got.value("topk")) == sets(want.value("topk"))
    close(got.value("attention"), want.value("attention")[:, attn])


@pytest.mark.parametrize("name", ("deepseek", *PATHS))
@few
@given(seed=SEEDS, power=st.integers(-12, 12))
def test_weights_scaled_by_a_power_of_two_scale_scores_exactly(name: str, seed: int, power: int) -> None:
    inputs = small_inputs(seed)
    assert inputs.index_weight is not None
    got = run(name, replace(inputs, index_weight=inputs.index_weight * 2.0**power))
    want = run(name, inputs)
    assert torch.equal(got.value("score"), want.value("score") * 2.0**power)
    assert sets(got.value("topk")) == sets(want.value("topk"))


@pytest.mark.parametrize("name", ("deepseek", *PATHS))
@few
@given(seed=SEEDS, k=st.integers(1, 15))
def test_selections_nest(name: str, seed: int, k: int) -> None:
    """The k best are among the 16 best, but for equal scores at the cut, which bf16 scores have."""
    inputs = small_inputs(seed)
    wide = run(name, inputs)
    narrow = run(name, replace(inputs, config=replace(inputs.config, index_topk=k)))
    for row, (few_picks, picks) in enumerate(zip(sets(narrow.value("topk")), sets(wide.value("topk")), strict=True)):
        cut = min(float(wide.value("score")[row, entry]) for entry in picks)
        assert len(few_picks) == min(k, int(inputs.visible[row]))
        assert all(float(wide.value("score")[row, entry]) <= cut for entry in few_picks - picks)
