"""From a fault to a seed: the call contracts of field reports (`cases.field_report.COMPONENTS`) as building blocks.

A fault that replaces the inside of a fused kernel (`bf16-k` has one for keys, one for queries, one for scores) is
planted as the whole kernel in torch with the fault in it. `tests/difftest/mutants` plants each of these stand-ins
without a fault: the path then agrees.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..cases.field_report import Component
from ..cases.field_reports import FIELD_REPORTS
from ..kernels.layout import write_slots
from ..paths import _sglang_math as math_
from ..reference.inputs import LayerInputs
from ..trace import StageTensors, Trace
from .mutant import Block, Seed

FP8, BF16 = "sglang-fp8-model", "bf16-k"

MakeKey = Callable[[LayerInputs, Tensor, Tensor, Tensor], Tensor]
"""(inputs, pooled fp32 [n, D], norm weight [D], positions int64 [n]) -> keys [n, D] before storage."""

MakeQuery = Callable[[LayerInputs, Tensor], Tensor]
"""(inputs, query fp32 [R, H, D]) -> queries [R, H, D] before storage."""


def reported(report: str, fault: str) -> Component:
    """The component that emulates a fault of a field report."""
    return next(item.component for item in FIELD_REPORTS[report].faults if item.name == fault)


def both(block: str, wrap: Callable[[Any, Block], Block]) -> dict[str, Seed]:
    """The same block in both paths: `bf16-k` takes these stages from the other."""
    return {FP8: Seed(block, wrap), BF16: Seed(block, wrap)}


# keys and queries ----------------------------------------------------------------------------------------------------


def make_key(
    inputs: LayerInputs,
    pooled: Tensor,
    weight: Tensor,
    positions: Tensor,
    *,
    norm: Callable[[Tensor, Tensor, float], Tensor] = math_.rms_norm,
    rotate: Callable[[LayerInputs, Tensor, Tensor], Tensor] | None = None,
    hadamard: Callable[[Tensor], Tensor] = math_.hadamard,
) -> Tensor:
    """Keys before storage, any step replaced; rotate(inputs, x, positions)."""
    return hadamard((rotate or turn)(inputs, norm(pooled, weight, inputs.config.rms_norm_eps), positions))


def make_query(
    inputs: LayerInputs,
    query: Tensor,
    *,
    rotate: Callable[[LayerInputs, Tensor, Tensor], Tensor] | None = None,
    hadamard: Callable[[Tensor], Tensor] = math_.hadamard,
) -> Tensor:
    """Queries before storage, any step replaced; rotate(inputs, x, positions)."""
    return hadamard((rotate or turn)(inputs, query, inputs.row_position))


def turn(inputs: LayerInputs, x: Tensor, positions: Tensor) -> Tensor:
    """RoPE of x [n, ..., D] at positions [n]."""
    table = math_.rope_table(inputs.config, inputs.kind, positions)
    return math_.rotate(x, table.reshape(len(table), *(1,) * (x.ndim - 2), *table.shape[1:]))


def as_rotation(component: Component) -> Callable[[LayerInputs, Tensor, Tensor], Tensor]:
    """A field report's `rotate` component, (x [n, D], position, kind) -> [n, D], for rows of any rank."""

    def rotate(inputs: LayerInputs, x: Tensor, positions: Tensor) -> Tensor:
        each = x[0].numel() // x.shape[-1] if len(x) else 1
        flat = component(x.reshape(-1, x.shape[-1]), positions.repeat_interleave(each), inputs.kind)
        return flat.float().view(x.shape)  # type: ignore[no-any-return]

    return rotate


def as_key(component: Component) -> MakeKey:
    """A field report's `index_key` component, (pooled, norm weight, entry) -> keys."""
    return lambda inputs, pooled, weight, positions: component(pooled, weight, positions // inputs.ratio).float()


def keys(make: MakeKey) -> dict[str, Seed]:
    """`make` in place of key preparation."""

    def store_step(path: Any, original: Block) -> Block:
        def block(inputs: LayerInputs, pooled: Tensor, entries: Tensor, slots: Tensor, cache: Tensor) -> None:
            assert inputs.index is not None
            key = make(inputs, pooled[entries], inputs.index.norm_weight, inputs.entry_position[entries])
            write_slots(cache, slots[entries], key.to(torch.bfloat16))

        return block

    return {FP8: Seed("prepare_key", lambda path, original: make), BF16: Seed("store_step", store_step)}


def queries(make: MakeQuery) -> dict[str, Seed]:
    """`make` in place of query preparation."""

    def index_q(path: Any, original: Block) -> Block:
        def block(inputs: LayerInputs, trace: Trace) -> StageTensors:
            assert inputs.index_query is not None
            return {"value": make(inputs, inputs.index_query.float()).to(torch.bfloat16).float()}

        return block

    return {FP8: Seed("prepare_query", lambda path, original: make), BF16: Seed("index_q", index_q)}


# stages as components ------------------------------------------------------------------------------------------------


def pooled_in_chunks(component: Component) -> dict[str, Seed]:
    """(chunks of kv_score, ape) -> after each chunk all entries so far; entries it no longer holds are 0."""

    def pool(inputs: LayerInputs, tokens: list[Tensor], ape: Tensor) -> list[Tensor]:
        out = []
        for request, rows in enumerate(tokens):
            cuts = [span.stop - span.start for step in inputs.steps for span in step if span.request == request]
            held = component(list(torch.split(rows, cuts)), ape)[-1]
            out.append(torch.zeros(inputs.entries[request], ape.shape[1]))
            out[-1][len(out[-1]) - len(held) :] = held.float()
        return out

    return _pooled(pool)


def pooled_in_batch(component: Component) -> dict[str, Seed]:
    """(kv_score of each request, ape) -> its entries."""
    return _pooled(lambda inputs, tokens, ape: component(tokens, ape))


DRAFTS = 5
"""Draft tokens of the speculative step that `pooled_after_drafts` puts before a request's second step."""


def pooled_after_drafts(component: Component) -> dict[str, Seed]:
    """(prefill, rejected draft, 0, following tokens, ape) -> entries; the draft is the request's first tokens again."""

    def pool(inputs: LayerInputs, tokens: list[Tensor], ape: Tensor) -> list[Tensor]:
        out = []
        for request, rows in enumerate(tokens):
            cut = next(span.stop for step in inputs.steps for span in step if span.request == request)
            out.append(component(rows[:cut], rows[:DRAFTS], 0, rows[cut:], ape))
        return out

    return _pooled(pool)


def _pooled(pool: Callable[[LayerInputs, list[Tensor], Tensor], list[Tensor]]) -> dict[str, Seed]:
    def pool_layer(path: Any, original: Block) -> Block:
        def block(inputs: LayerInputs, part: Any) -> Tensor:
            offset = inputs.token_offset
            tokens = [part.kv_score[start:stop] for start, stop in pairwise(offset)]
            return torch.cat(pool(inputs, tokens, part.ape)).float()

        return block

    return both("pool_layer", pool_layer)


def scored(component: Component) -> dict[str, Seed]:
    """(query [R, H, D], key [E, D], weight [R, H]) -> scores [R, E], in place of the whole stage."""

    def score(path: Any, original: Block) -> Block:
        def block(inputs: LayerInputs, trace: Trace) -> StageTensors:
            query, key, weight = (trace.value(stage) for stage in ("index_q", "index_k", "head_weight"))
            out = torch.full((len(query), int(inputs.visible.max())), -torch.inf)
            for request, rows in requests(inputs):
                first, count = inputs.entry_offset[request], int(inputs.visible[rows].max())
                got = component(query[rows], key[first : first + count], weight[rows]).float()
                hidden = torch.arange(count) >= inputs.visible[rows][:, None]
                out[rows, :count] = got.masked_fill(hidden, -torch.inf)
            return {"value": out}

        return block

    return both("score", score)


def selected(component: Component) -> dict[str, Seed]:
    """(score [R, W], visible [R], k) -> entries [R, k]; an empty row's end is given as -1."""

    def topk(path: Any, original: Block) -> Block:
        def block(inputs: LayerInputs, trace: Trace) -> StageTensors:
            ends = torch.where(inputs.visible == 0, -1, inputs.visible)
            return {"value": component(trace.value("score"), ends, inputs.config.index_topk).int()}

        return block

    return both("topk", topk)


def selected_by_position(component: Component) -> dict[str, Seed]:
    """(score [R, W], positions of one request's step, k) -> entries [R, k]."""

    def topk(path: Any, original: Block) -> Block:
        def block(inputs: LayerInputs, trace: Trace) -> StageTensors:
            score, k = trace.value("score"), inputs.config.index_topk
            out = torch.full((len(score), k), -1, dtype=torch.int32)
            for step in inputs.steps:
                for span in step:
                    at = (inputs.row_request == span.request) & (inputs.row_position >= span.start)
                    rows = (at & (inputs.row_position < span.stop)).nonzero()[:, 0]
                    if len(rows):
                        out[rows] = component(score[rows], inputs.row_position[rows], k).int()
            return {"value": out}

        return block

    return both("topk", topk)


def attended(component: Component) -> dict[str, Seed]:
    """(q, kv, index with -1, sink, scale) -> out, lse; slot 0 of kv holds a NaN that no index names."""

    def attend(path: Any, original: Block) -> Block:
        def block(query: Tensor, keys: Tensor, valid: Tensor, sink: Tensor, scale: float) -> tuple[Tensor, Tensor]:
            place = torch.where(valid[0], torch.arange(1, 1 + keys.shape[1]), -1)
            outs = []
            for row in range(len(query)):
                place = torch.where(valid[row], torch.arange(1, 1 + keys.shape[1]), -1)
                latents = torch.cat((torch.full_like(keys[row, :1], torch.nan), keys[row]))
                outs.append(component(query[row : row + 1], latents, place[None], sink, scale))
            out, lse = (torch.cat(parts).float() for parts in zip(*outs, strict=True))
            return math_.to_bf16(out), lse

        return block

    return both("attend", attend)


def requests(inputs: LayerInputs) -> Iterator[tuple[int, Tensor]]:
    """Requests that have rows, and these rows."""
    for request in range(len(inputs.lengths)):
        rows = (inputs.row_request == request).nonzero()[:, 0]
        if len(rows):
            yield request, rows


def with_part(part: Any, **changed: Any) -> Any:
    """A compressor's inputs with some replaced."""
    return replace(part, **changed)


def merged(*seeds: Mapping[str, Seed]) -> dict[str, Seed]:
    """Seeds of several paths together."""
    return {path: seed for each in seeds for path, seed in each.items()}
