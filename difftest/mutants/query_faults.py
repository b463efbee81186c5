"""Mutants of `index_q` and `head_weight`."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..kernels.query import head_weight as unscaled_weight
from ..paths import _sglang_math as math_
from ..reference.inputs import LayerInputs
from ..trace import StageTensors, Trace
from .adapters import BF16, FP8, as_rotation, make_query, merged, queries, reported, turn
from .bench_cases import CHUNKED
from .mutant import Block, Mutant, Seed

ROW_NORMS = (0.5, 1.0, 2.0)


def _identity(x: Tensor) -> Tensor:
    return x


def _first_position(inputs: LayerInputs, x: Tensor, positions: Tensor) -> Tensor:
    """Every token of a step takes the position of the step's first one."""
    shared = positions.clone()
    for step in inputs.steps:
        for span in step:
            inside = (inputs.row_request == span.request) & (positions >= span.start) & (positions < span.stop)
            shared[inside] = span.start
    return turn(inputs, x, shared)


def _next_position(inputs: LayerInputs, x: Tensor, positions: Tensor) -> Tensor:
    return turn(inputs, x, positions + 1)


def _unnormalised(inputs: LayerInputs, query: Tensor) -> Tensor:
    """Each row keeps the norm of a latent that was not normalised."""
    norm = torch.tensor(ROW_NORMS).repeat(-(-len(query) // len(ROW_NORMS)))[: len(query)]
    return make_query(inputs, query * norm[:, None, None])


def _next_head(inputs: LayerInputs, query: Tensor) -> Tensor:
    return make_query(inputs, query).roll(1, 1)


def _next_row(inputs: LayerInputs, query: Tensor) -> Tensor:
    return make_query(inputs, query).roll(1, 0)


def _rounded_rotation(inputs: LayerInputs, x: Tensor, positions: Tensor) -> Tensor:
    return turn(inputs, x, positions).bfloat16().float()


def _pow2_scale(query: Tensor) -> tuple[Tensor, Tensor]:
    scale = torch.exp2(math_.raw_scale(query).log2().ceil())
    return math_.encode_e4m3(query / scale), scale


def _no_scale(query: Tensor) -> tuple[Tensor, Tensor]:
    """A plain cast, as in a kernel test: scale 1."""
    return math_.encode_e4m3(query), torch.ones_like(query[..., :1])


def _e4m3_query(inputs: LayerInputs, query: Tensor) -> Tensor:
    """The query is rounded to e4m3 although bf16 is declared."""
    made = make_query(inputs, query)
    scale = math_.raw_scale(made)
    return math_.decode_e4m3(math_.encode_e4m3(made / scale)) * scale


def _query(name: str, report: str, seeds: Any, says: str) -> Mutant:
    return Mutant(name, report, "index_q", CHUNKED, seeds, says)


def _turned(report: str, fault: str) -> dict[str, Seed]:
    return queries(partial(make_query, rotate=as_rotation(reported(report, fault))))


QUERY_MUTANTS = (
    _query("n1-half-split-query", "N1", _turned("n1-pairs", "half-split pairs"), "pairs (i, i + 32) in queries"),
    _query(
        "n2-plain-base-query",
        "N2",
        _turned("n2-base-by-layer-kind", "base 10,000 everywhere"),
        "base 10,000 for queries",
    ),
    _query(
        "c13-first-position",
        "C13",
        queries(partial(make_query, rotate=_first_position)),
        "all tokens of a step at the position of its first",
    ),
    _query("n3-next-position", "N3", queries(partial(make_query, rotate=_next_position)), "queries one position on"),
    _query("n5-hadamard-key-only", "N5", queries(partial(make_query, hadamard=_identity)), "Hadamard on keys alone"),
    _query("n8-unnormalised-latent", "N8", queries(_unnormalised), "query from the latent before its norm"),
    _query("l4-next-head", "L4", queries(_next_head), "each head has its neighbour's query"),
    _query("t13-next-row", "T13", queries(_next_row), "each row has its neighbour's query"),
    _query(
        "d5-bf16-after-rotation",
        "D5",
        queries(partial(make_query, rotate=_rounded_rotation)),
        "rotated query rounded to bf16, undeclared",
    ),
    _query(
        "q1-pow2-query",
        "Q1",
        merged({FP8: Seed("quantise_query", lambda path, original: _pow2_scale)}, {BF16: queries(_e4m3_query)[BF16]}),
        "query stored in another format than declared",
    ),
    _query(
        "q1-unscaled-query",
        "Q1",
        {FP8: Seed("quantise_query", lambda path, original: _no_scale)},
        "query cast to e4m3 without a scale",
    ),
)


def _weights(change: Callable[[Tensor], Tensor]) -> dict[str, Seed]:
    """change(weight with its factor, fp32 [R, H]) -> head weights."""

    def scale_weight(path: Any, original: Block) -> Block:
        return lambda weight, factor: change(original(weight, factor))

    def head_weight(path: Any, original: Block) -> Block:
        def block(inputs: LayerInputs, trace: Trace) -> StageTensors:
            return {"value": change(original(inputs, trace)["value"])}

        return block

    return {FP8: Seed("scale_weight", scale_weight), BF16: Seed("head_weight", head_weight)}


def _without_heads(weight: Tensor) -> Tensor:
    return weight * math.sqrt(weight.shape[-1])


def _sigmoid(weight: Tensor) -> Tensor:
    heads = weight.shape[-1]
    factor = float(unscaled_weight(torch.ones(1, heads))[0, 0])
    return (weight / factor).sigmoid() * factor


def _rounded(weight: Tensor) -> Tensor:
    return weight.bfloat16().float()


def _absolute(weight: Tensor) -> Tensor:
    return weight.abs()


def _neighbour(weight: Tensor) -> Tensor:
    return weight.roll(1, 0)


def _weight(name: str, report: str, change: Callable[[Tensor], Tensor], says: str) -> Mutant:
    return Mutant(name, report, "head_weight", CHUNKED, _weights(change), says)


WEIGHT_MUTANTS = (
    _weight("l1-no-head-factor", "L1", _without_heads, "heads^-1/2 missing: a common factor"),
    _weight("l1-sigmoid-weight", "L1", _sigmoid, "a sigmoid on the head weights"),
    _weight("l1-absolute-weight", "L1", _absolute, "signs of the head weights lost"),
    _weight("l2-bf16-weight", "L2", _rounded, "head weights rounded to bf16, undeclared"),
    _weight("t13-next-row-weight", "T13", _neighbour, "each row has its neighbour's weights"),
)
