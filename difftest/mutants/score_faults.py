"""Mutants of `score`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..kernels.layout import ENTRY_DIM, PAGE_ENTRIES
from ..reference.inputs import LayerInputs
from ..trace import StageTensors, Trace
from .adapters import BF16, FP8, reported, scored
from .bench_cases import CHUNKED, DECODE
from .mutant import Block, Mutant, Seed

GARBAGE = 1e30
"""What lies in a score buffer that nothing was written to."""

OVERLAP = 3
"""Heads of a row block that are added twice."""

Change = Callable[[LayerInputs, Trace, Tensor], Tensor]


def _after(change: Change) -> dict[str, Seed]:
    """change(inputs, trace, scores [R, E] with -inf past visible) -> scores, after the stage."""

    def score(path: Any, original: Block) -> Block:
        def block(inputs: LayerInputs, trace: Trace) -> StageTensors:
            return {"value": change(inputs, trace, original(inputs, trace)["value"].clone())}

        return block

    return {path: Seed("score", score) for path in (FP8, BF16)}


def _reads(change: Callable[[LayerInputs, Trace], Trace]) -> dict[str, Seed]:
    """change(inputs, trace) -> the trace that the scorer reads instead."""

    def score(path: Any, original: Block) -> Block:
        def block(inputs: LayerInputs, trace: Trace) -> StageTensors:
            made: StageTensors = original(inputs, change(inputs, trace))
            return made

        return block

    return {path: Seed("score", score) for path in (FP8, BF16)}


def _with(trace: Trace, stage: Any, change: Callable[[Tensor], Tensor]) -> Trace:
    """The trace with every per-row or per-entry tensor of a stage changed alike."""
    parts = {name: part if name == "raw" else change(part) for name, part in trace[stage].items()}
    parts.pop("raw", None)
    return Trace(trace.case, trace.layer, trace.path, {**trace.stages, stage: parts})


def _rounded_bf16(inputs: LayerInputs, trace: Trace, score: Tensor) -> Tensor:
    return score.bfloat16().float()


def _rounded_fp16(inputs: LayerInputs, trace: Trace, score: Tensor) -> Tensor:
    return score.half().float()


def _garbage_past_end(inputs: LayerInputs, trace: Trace, score: Tensor) -> Tensor:
    return score.masked_fill(score == -torch.inf, GARBAGE)


def _nan_scores(inputs: LayerInputs, trace: Trace, score: Tensor) -> Tensor:
    score[1:, 5] = torch.nan
    return score


def _zeros(inputs: LayerInputs, trace: Trace, score: Tensor) -> Tensor:
    return torch.where(score == -torch.inf, score, 0.0)


def _tail_rows_stale(inputs: LayerInputs, trace: Trace, score: Tensor) -> Tensor:
    """The last quarter of the rows is not written: the row before shows through."""
    hidden = score == -torch.inf
    start = len(score) * 3 // 4
    score[start:] = score[start - 1]
    return score.masked_fill(hidden, -torch.inf).masked_fill(~hidden & (score == -torch.inf), 0.0)


def _row_stride(inputs: LayerInputs, trace: Trace, score: Tensor) -> Tensor:
    """Rows from the eighth on are written one row early."""
    hidden = score == -torch.inf
    score[8:-1] = score[9:].clone()
    return score.masked_fill(hidden, -torch.inf).masked_fill(~hidden & (score == -torch.inf), 0.0)


def _stale_block(inputs: LayerInputs, trace: Trace, score: Tensor) -> Tensor:
    """The second block of 64 columns holds the first one's scores, the same on every run."""
    hidden = score == -torch.inf
    width = score.shape[1] - PAGE_ENTRIES
    score[:, PAGE_ENTRIES:] = score[:, :width]
    return score.masked_fill(hidden, -torch.inf)


def _batch_visibility(inputs: LayerInputs, trace: Trace, score: Tensor) -> Tensor:
    """Every row's end is that of the longest row."""
    return score.masked_fill(score == -torch.inf, 0.0)


def _head_lost(inputs: LayerInputs, trace: Trace) -> Trace:
    def change(weight: Tensor) -> Tensor:
        weight = weight.clone()
        weight[:, -1] = 0.0
        return weight

    return _with(trace, "head_weight", change)


def _heads_twice(inputs: LayerInputs, trace: Trace) -> Trace:
    def change(weight: Tensor) -> Tensor:
        weight = weight.clone()
        weight[:, :OVERLAP] *= 2.0
        return weight

    return _with(trace, "head_weight", change)


def _bf16_weights(inputs: LayerInputs, trace: Trace) -> Trace:
    return _with(trace, "head_weight", lambda weight: weight.bfloat16().float())


def _keys_shifted(inputs: LayerInputs, trace: Trace) -> Trace:
    return _with(trace, "index_k", lambda part: part.roll(1, 0))


def _half_dims(inputs: LayerInputs, trace: Trace) -> Trace:
    """The product stops at dim 120: its last tile is dropped."""

    def change(part: Tensor) -> Tensor:
        part = part.clone()
        if part.shape[-1] == ENTRY_DIM:
            part[..., -8:] = 0
        return part

    return _with(trace, "index_k", change)


def _scale_not_folded(path: Any, original: Block) -> Block:
    return lambda weight, scale: weight


def _scale_of_row_mean(path: Any, original: Block) -> Block:
    return lambda weight, scale: weight * scale.mean(-1, keepdim=True)


def _key_scale_lost(path: Any, original: Block) -> Block:
    return lambda total, scale: total * scale.mean()


def _scores(change: Callable[..., tuple[Any, ...]]) -> dict[str, Seed]:
    """change(query, weight, cache, page table, lengths, request) -> what the bf16 kernel gets."""

    def scores(path: Any, original: Block) -> Block:
        def block(*args: Tensor, width: int) -> Tensor:
            made: Tensor = original(*change(*args), width=width)
            return made.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf)

        return block

    return {BF16: Seed("scores", scores)}


def _neighbour_row(q: Tensor, w: Tensor, cache: Tensor, table: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
    return q, w, cache, table.roll(1, 0).clamp_min(0), *rest


def _first_request(*args: Tensor) -> tuple[Tensor, ...]:
    return *args[:-1], args[-1] * 0


def _whole_pages(q: Tensor, w: Tensor, cache: Tensor, table: Tensor, lengths: Tensor, r: Tensor) -> tuple[Tensor, ...]:
    """Lengths are rounded down to whole pages."""
    return q, w, cache, table, lengths // PAGE_ENTRIES * PAGE_ENTRIES, r


def _score(name: str, report: str, seeds: Any, says: str, **rest: Any) -> Mutant:
    return Mutant(name, report, "score", rest.pop("case", CHUNKED), seeds, says, **rest)


SCORE_MUTANTS = (
    _score("l1-no-relu", "L1", scored(reported("l1-relu-and-weight", "no ReLU")), "ReLU dropped"),
    _score("l1-weight-first", "L1", scored(reported("l1-relu-and-weight", "weight before ReLU")), "ReLU after weight"),
    _score("l1-mean-of-heads", "L1", scored(reported("l1-relu-and-weight", "mean of heads")), "mean instead of sum"),
    _score("l1-head-lost", "L1", _reads(_head_lost), "the last head is not added"),
    _score("l1-heads-twice", "L1", _reads(_heads_twice), "some heads are added twice"),
    _score("l2-bf16-weights-read", "L2", _reads(_bf16_weights), "weights rounded to bf16 as they are read"),
    _score("l2-bf16-scores", "L2", _after(_rounded_bf16), "scores rounded to bf16, undeclared"),
    _score("l2-fp16-scores", "L2", _after(_rounded_fp16), "scores rounded to fp16, undeclared"),
    _score("l3-garbage-past-end", "L3", _after(_garbage_past_end), "columns past the end hold stale values"),
    _score("l4-row-stride", "L4", _after(_row_stride), "rows from the eighth on land one early"),
    _score("l5-tail-rows", "L5", _after(_tail_rows_stale), "the last rows are not written"),
    _score("l8-batch-visibility", "L8", _after(_batch_visibility), "every row as long as the longest"),
    _score("l10-stale-block", "L10", _after(_stale_block), "a block repeats the one before, run after run"),
    _score("l12-zero-scores", "L12", _after(_zeros), "all scores zero"),
    _score("t6-nan-scores", "T6", _after(_nan_scores), "NaN in one column"),
    _score("e2-neighbouring-key", "E2", _reads(_keys_shifted), "each entry scored with its neighbour's key"),
    _score("s8-half-a-tile", "S8", _reads(_half_dims), "the last 8 dims are not multiplied"),
    _score("q1-scale-not-folded", "Q1", {FP8: Seed("fold_weight", _scale_not_folded)}, "query scale not applied"),
    _score("q1-one-scale-a-row", "Q1", {FP8: Seed("fold_weight", _scale_of_row_mean)}, "one query scale for all heads"),
    _score("s8-key-scale-lost", "S8", {FP8: Seed("scale_score", _key_scale_lost)}, "one key scale for all entries"),
    _score("t11-neighbours-table", "T11", _scores(_neighbour_row), "page-table row of the neighbour"),
    _score("t13-stale-request", "T13", _scores(_first_request), "token-to-request map not rebuilt", case=DECODE),
    _score("s9-whole-pages", "S9", _scores(_whole_pages), "entries of the last, partial page not scored"),
)
