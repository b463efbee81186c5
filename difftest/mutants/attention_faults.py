"""Mutants of `attention`."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..reference.inputs import LayerInputs
from ..trace import Trace
from .adapters import attended, both, reported
from .bench_cases import CHUNKED
from .mutant import Block, Mutant, Wrap

REPEATED = 3
"""Picks that are attended to twice."""

YARN_MAGNITUDE = (0.1 * math.log(16) + 1) ** 2
"""YaRN's attention factor for a stretch of 16, which these models do not use."""

Arguments = tuple[Tensor, Tensor, Tensor, Tensor, float]


def _attend(change: Callable[[Tensor, Tensor, Tensor, Tensor, float], Arguments]) -> Wrap:
    """change(query, keys, valid, sink, scale) -> the arguments that `attend` gets."""

    def wrap(path: Any, original: Block) -> Block:
        return lambda query, keys, valid, sink, scale: original(*change(query, keys, valid, sink, scale))

    return wrap


def _yarn_factor(query: Tensor, keys: Tensor, valid: Tensor, sink: Tensor, scale: float) -> Arguments:
    return query, keys, valid, sink, scale * YARN_MAGNITUDE


def _next_sink(query: Tensor, keys: Tensor, valid: Tensor, sink: Tensor, scale: float) -> Arguments:
    return query, keys, valid, sink.roll(1), scale


def _window_short(query: Tensor, keys: Tensor, valid: Tensor, sink: Tensor, scale: float) -> Arguments:
    """The oldest token of the window is left out."""
    short = valid.clone()
    short[:, 0] = False
    return query, keys, short, sink, scale


def _padding_attended(query: Tensor, keys: Tensor, valid: Tensor, sink: Tensor, scale: float) -> Arguments:
    """Padding counts as a key of zeros."""
    return query, keys, torch.ones_like(valid), sink, scale


def _base_two(path: Any, original: Block) -> Block:
    def block(*args: Any) -> tuple[Tensor, Tensor]:
        out, lse = original(*args)
        return out, lse / math.log(2)

    return block


def _truncated(path: Any, original: Block) -> Block:
    """The output is truncated to bf16, and made in fp32 before."""

    def block(query: Tensor, keys: Tensor, valid: Tensor, sink: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        out, lse = original(query, keys, valid, sink, scale)
        return out * (1 - 2.0**-7), lse

    return block


def _next_position(path: Any, original: Block) -> Block:
    return lambda inputs, positions: original(inputs, positions + 1)


def _not_rotated(path: Any, original: Block) -> Block:
    return lambda inputs, positions: original(inputs, positions * 0)


def _next_head(path: Any, original: Block) -> Block:
    return lambda inputs: original(inputs).roll(1, 1)


def _no_norm(path: Any, original: Block) -> Block:
    return lambda x, weight, eps: x


def _repeated_picks(path: Any, original: Block) -> Block:
    def block(inputs: LayerInputs, trace: Trace) -> Tensor:
        entries: Tensor = original(inputs, trace)
        return torch.cat((entries, entries[:, :REPEATED]), 1)

    return block


def _merged_picks(path: Any, original: Block) -> Block:
    """A row also attends to what the row before it picked, where it can see that."""

    def block(inputs: LayerInputs, trace: Trace) -> Tensor:
        entries: Tensor = original(inputs, trace)
        before = entries.roll(1, 0)
        seen = (before < inputs.visible[:, None]) & (inputs.row_request == inputs.row_request.roll(1))[:, None]
        held = (before[:, :, None] == entries[:, None, :]).any(-1)
        return torch.cat((entries, torch.where(seen & ~held, before, -1)), 1)

    return block


def _one_entry_on(path: Any, original: Block) -> Block:
    def block(inputs: LayerInputs, trace: Trace) -> Tensor:
        entries: Tensor = original(inputs, trace)
        return torch.where(entries > 0, entries - 1, entries)

    return block


def _minus_one_as_zero(path: Any, original: Block) -> Block:
    return lambda inputs, trace: original(inputs, trace).clamp_min(0)


def _past_table(path: Any, original: Block) -> Block:
    """The last latents of a request are read from what lies behind them."""

    def block(latents: Tensor, index: Tensor) -> Tensor:
        moved = torch.where(index == index.amax(1, keepdim=True), (index + 1) % max(1, len(latents)), index)
        return original(latents, torch.where(index < 0, index, moved))  # type: ignore[no-any-return]

    return block


def _fault(name: str) -> Any:
    return attended(reported("a2-a3-slot-0-and-sink", name))


def _attention(name: str, report: str, seeds: Any, says: str) -> Mutant:
    return Mutant(name, report, "attention", CHUNKED, seeds, says)


ATTENTION_MUTANTS = (
    _attention("a2-nan-leaks", "A2", _fault("NaN times 0"), "masked lanes multiply slot 0 by zero"),
    _attention("a3-sink-dropped", "A3", _fault("sink dropped"), "no sink in the denominator"),
    _attention("a3-sink-in-parts", "A3", _fault("sink in each part"), "the sink in each part of a merge"),
    _attention("a3-sink-in-lse", "A3", _fault("sink inside the log-sum-exp"), "log-sum-exp with the sink"),
    _attention("a3-next-sink", "A3", both("attend", _attend(_next_sink)), "each head has its neighbour's sink"),
    _attention("a3-lse-base-two", "A3", both("attend", _base_two), "log-sum-exp in base 2"),
    _attention("a4-repeated-picks", "A4", both("attended_entries", _repeated_picks), "some picks count twice"),
    _attention("a4-window-short", "A4", both("attend", _attend(_window_short)), "the window is one short"),
    _attention("a6-yarn-factor", "A6", both("attend", _attend(_yarn_factor)), "YaRN's factor on the softmax scale"),
    _attention("a6-next-position", "A6", both("rope_table", _next_position), "query rotated one position on"),
    _attention("a6-not-rotated", "A6", both("rope_table", _not_rotated), "query not rotated"),
    _attention("n8-query-not-normed", "N8", both("norm", _no_norm), "query without its per-head norm"),
    _attention("l4-attention-next-head", "L4", both("attention_query", _next_head), "each head its neighbour's query"),
    _attention("a7-past-table", "A7", both("gather", _past_table), "the newest pick reads past its table"),
    _attention("k9-padding-attended", "K9", both("attend", _attend(_padding_attended)), "padding counts as a key"),
    _attention("k9-minus-one-as-zero", "K9", both("attended_entries", _minus_one_as_zero), "-1 read as entry 0"),
    _attention("t12-merged-picks", "T12", both("attended_entries", _merged_picks), "rows see each other's picks"),
    _attention("t11-one-entry-on", "T11", both("attended_entries", _one_entry_on), "picks read one entry off"),
    _attention("d35-output-shrinks", "D35", both("attend", _truncated), "output a bf16 step too small"),
)
