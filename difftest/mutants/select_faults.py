"""Mutants of `topk`."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..reference.inputs import LayerInputs
from ..trace import StageTensors, Trace
from .adapters import both, reported, selected, selected_by_position
from .bench_cases import CHUNKED, DECODE, PLATEAU, TIES
from .mutant import Block, Mutant, Wrap

CAP, TIE_SLOTS = 8, 24
"""Candidate buffer and tie slots, cut down as the cases are."""


def _row(change: Any) -> Wrap:
    """change(original, score of one row [n], k) -> entries, in place of `select`."""

    def wrap(path: Any, original: Block) -> Block:
        return lambda score, k: change(original, score, k)

    return wrap


def _coarse_keys(select: Block, score: Tensor, k: int) -> Tensor:
    return select(score.bfloat16().float(), k)  # type: ignore[no-any-return]


def _lost_ranks(select: Block, score: Tensor, k: int) -> Tensor:
    """The last quarter of the slots stays zero, as when other blocks' results are lost."""
    chosen: Tensor = select(score, k).clone()
    chosen[len(chosen) * 3 // 4 :] = 0
    return chosen


def _half_of_k(select: Block, score: Tensor, k: int) -> Tensor:
    return select(score, k // 2)  # type: ignore[no-any-return]


def _last_k(select: Block, score: Tensor, k: int) -> Tensor:
    """The newest k entries, as from a row of equal scores."""
    return torch.arange(max(0, len(score) - k), len(score))


def _least(select: Block, score: Tensor, k: int) -> Tensor:
    return select(-score, k)  # type: ignore[no-any-return]


def _threshold_low(select: Block, score: Tensor, k: int) -> Tensor:
    """The entry at the cut loses to the one after it."""
    if len(score) <= k:
        return select(score, k)  # type: ignore[no-any-return]
    ranked = score.topk(k + 1).indices
    return torch.cat((ranked[: k - 1], ranked[k:])).sort().values


def _stale(path: Any, original: Block) -> Block:
    """A row gets the picks of the row before it when both select all k: metadata of the last call."""

    def block(inputs: LayerInputs, trace: Trace) -> StageTensors:
        picks = original(inputs, trace)["value"].clone()
        full = (inputs.visible > inputs.config.index_topk).tolist()
        for row in range(len(picks) - 1, 0, -1):
            if full[row] and full[row - 1] and inputs.visible[row] >= inputs.visible[row - 1]:
                picks[row] = picks[row - 1]
        return {"value": picks}

    return block


def _padding_first(path: Any, original: Block) -> Block:
    def block(inputs: LayerInputs, trace: Trace) -> StageTensors:
        return {"value": original(inputs, trace)["value"].flip(1)}

    return block


SELECT_MUTANTS = (
    Mutant(
        "t1-candidate-buffer",
        "T1",
        "topk",
        CHUNKED,
        selected(partial(reported("t1-candidate-buffer", "buffer of 2,048 candidates"), cap=CAP)),
        "a coarse bin with more members than the candidate buffer loses winners",
    ),
    Mutant(
        "t2-plateau",
        "T2",
        "topk",
        PLATEAU,
        selected(partial(reported("t2-plateau", "1,024 slots for ties"), slots=TIE_SLOTS)),
        "slots for ties run out and stay unwritten",
    ),
    Mutant("t5-coarse-keys", "T5", "topk", TIES, both("select", _row(_coarse_keys)), "compares the top 16 bits only"),
    Mutant("t8-lost-ranks", "T8", "topk", CHUNKED, both("select", _row(_lost_ranks)), "a run of slots stays zero"),
    Mutant("t10-half-of-k", "T10", "topk", CHUNKED, both("select", _row(_half_of_k)), "k comes from another config"),
    Mutant("l12-last-k", "L12", "topk", CHUNKED, both("select", _row(_last_k)), "the newest k, whatever the scores"),
    Mutant("k5-least", "K5", "topk", CHUNKED, both("select", _row(_least)), "the k smallest scores"),
    Mutant("t1-cut-off-by-one", "T1", "topk", CHUNKED, both("select", _row(_threshold_low)), "cut one rank too low"),
    Mutant("t13-stale-picks", "T13", "topk", CHUNKED, both("topk", _stale), "picks of the row before"),
    Mutant("k7-padding-first", "K7", "topk", CHUNKED, both("topk", _padding_first), "-1 before the entries"),
    Mutant(
        "l3-padded-row",
        "L3",
        "topk",
        CHUNKED,
        selected(reported("l3-past-row-end", "padded row scanned")),
        "scans columns past the row's end",
    ),
    Mutant(
        "l6-length-one",
        "L6",
        "topk",
        DECODE,
        selected(reported("l6-no-entries", "length raised to 1")),
        "an empty row gives entry 0",
    ),
    Mutant(
        "l7-unsigned-end",
        "L7",
        "topk",
        DECODE,
        selected(reported("l7-negative-ends", "unsigned end")),
        "a negative end is read as 4 billion",
    ),
    Mutant(
        "l8-step-visibility",
        "L8",
        "topk",
        CHUNKED,
        selected_by_position(reported("l8-step-visibility", "one length a step")),
        "every token of a step sees what its last one does",
    ),
)
