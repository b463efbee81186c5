"""Gated pooling of tokens into entries: as a function of whole sequences, of a layer, and as a stateful object."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from .chunks import MAX_BYTES, slices
from .inputs import CompressorInputs, LayerInputs

OVERLAP_RATIO = 4
"""The ratio whose entries pool the previous block too."""


def pool(kv_score: Tensor, ape: Tensor, ratio: int, *, max_bytes: int = MAX_BYTES) -> Tensor:
    """Pools a whole sequence into its complete entries, in fp64 (`model.py`, Compressor).

    kv_score [T, 4 D] (ratio 4: kv overlap, kv own, gate overlap, gate own) or [T, 2 D] (kv, gate), token 0 first.
    ape [2 ratio, D] (rows of the overlap half, then of the own half) or [ratio, D]: bias of the gate by position in
    block. Returns [T // ratio, D]: per dim, the softmax over slots of (gate + ape) weighs the slots' kv. Ratio 4 has
    eight slots: the previous block through the overlap columns and the own block through the own columns; entry 0 has
    no previous block and pools four (gate -inf, contract K2).
    """
    entries = kv_score.shape[0] // ratio
    dim = ape.shape[-1]
    pooled = kv_score.new_empty(entries, dim, dtype=torch.float64)
    slots = ape.shape[0]
    for part in slices(entries, 6 * slots * dim * pooled.element_size(), max_bytes):
        pooled[part] = _pool_blocks(kv_score, ape.double(), ratio, part)
    return pooled


def _pool_blocks(kv_score: Tensor, ape: Tensor, ratio: int, part: slice) -> Tensor:
    """Entries part.start to part.stop of `pool`; `ape` is fp64."""
    dim = ape.shape[-1]
    own = torch.unflatten(kv_score[part.start * ratio : part.stop * ratio].double(), 0, (-1, ratio))
    if ratio != OVERLAP_RATIO:
        kv, gate = own[..., :dim], own[..., dim:] + ape
        return (kv * gate.softmax(1)).sum(1)
    before = torch.zeros_like(own)
    first = max(part.start - 1, 0)
    before[first + 1 - part.start :] = torch.unflatten(
        kv_score[first * ratio : (part.stop - 1) * ratio].double(), 0, (-1, ratio)
    )
    gate_before = before[..., 2 * dim : 3 * dim] + ape[:ratio]
    if part.start == 0:
        gate_before[0] = -torch.inf
    kv = torch.cat((before[..., :dim], own[..., dim : 2 * dim]), 1)
    gate = torch.cat((gate_before, own[..., 3 * dim :] + ape[ratio:]), 1)
    return (kv * gate.softmax(1)).sum(1)


Which = Literal["index", "main"]
Pooling = Callable[[Tensor, Tensor, int], Tensor]


def compressor_inputs(inputs: LayerInputs, which: Which) -> CompressorInputs:
    """The indexer's or the main compressor's inputs; ValueError when this layer kind has none."""
    found = inputs.index if which == "index" else inputs.main
    if found is None:
        raise ValueError(f"a {inputs.kind} layer has no {which} compressor: choose a csa layer (or hca for main)")
    return found


def pooled_pieces(
    inputs: LayerInputs, which: Which, pooling: Pooling = pool, *, max_bytes: int = MAX_BYTES
) -> Iterator[tuple[slice, Tensor]]:
    """The pooled entries of a layer piece by piece: (rows of the packed entry axis, [rows, D]), in order.

    A request's given `pooled_prefix` (fp32) comes first, then the entries that `pooling` makes of its tokens, in the
    precision of `pooling`. Pieces of the prefix stay within `max_bytes`.
    """
    read = compressor_inputs(inputs, which)
    prefix_start = 0
    for request, complete in enumerate(inputs.entries):
        first, given = inputs.entry_offset[request], inputs.prefix_entries[request]
        for part in slices(given, read.ape.shape[-1] * 8, max_bytes):
            prefix = read.pooled_prefix[prefix_start + part.start : prefix_start + part.stop]
            yield slice(first + part.start, first + part.stop), prefix
        prefix_start += given
        tokens = read.kv_score[inputs.token_offset[request] : inputs.token_offset[request + 1]]
        pooled = pooling(tokens, read.ape, inputs.ratio)
        skip = given - inputs.first_token(request) // inputs.ratio
        yield slice(first + given, first + complete), pooled[skip:]


def pool_layer(inputs: LayerInputs, which: Which, *, max_bytes: int = MAX_BYTES) -> Tensor:
    """All entries of a layer's indexer (`index`) or main (`main`) compressor, [E, D] fp64, packed over requests."""
    dim = compressor_inputs(inputs, which).ape.shape[-1]
    packed = torch.empty(inputs.entry_offset[-1], dim, dtype=torch.float64, device=inputs.row_position.device)
    for rows, pooled in pooled_pieces(inputs, which, partial(pool, max_bytes=max_bytes), max_bytes=max_bytes):
        packed[rows] = pooled
    return packed


@dataclass(frozen=True)
class CompressorState:
    """What a compressor must remember between chunks: `tokens` seen, and the `kv_score` rows of the last ones.

    Produced by `Compressor.state`, consumed by `Compressor.restore` (the same request, or another that hits its
    prefix).
    """

    tokens: int
    kv_score: Tensor


class Compressor:
    """The compressor of one request, fed chunk by chunk; its entries equal those of `pool`, however tokens are split.

    ape, ratio   as in `pool`.   dim   entry width D.
    rollback_limit   tokens that `rollback` can take back at any time; more rows are remembered for it.
    """

    def __init__(self, ape: Tensor, ratio: int, dim: int, *, rollback_limit: int = 8) -> None:
        if ape.shape[-1] != dim:
            raise ValueError(f"ape is {tuple(ape.shape)} and dim is {dim}: the last axis of ape must be dim")
        self.ape, self.ratio, self.dim = ape, ratio, dim
        self.rollback_limit = rollback_limit
        halves = 2 if ratio == OVERLAP_RATIO else 1
        self.tokens = 0
        self._tail = ape.new_empty(0, 2 * halves * dim, dtype=torch.float64)

    @property
    def entries(self) -> int:
        """Complete entries so far."""
        return self.tokens // self.ratio

    def feed(self, kv_score: Tensor) -> Tensor:
        """Takes the next tokens' rows [n, 4 D or 2 D]; returns the entries they complete, [m, D] fp64 (m may be 0)."""
        known = torch.cat((self._tail, kv_score.double()))
        first = self.tokens - len(self._tail)
        before, self.tokens = self.entries, self.tokens + len(kv_score)
        fresh = pool(known, self.ape, self.ratio)[before - first // self.ratio :]
        self._tail = known[max(0, self._first_needed(self.tokens) - first) :].clone()
        return fresh

    def state(self) -> CompressorState:
        """A snapshot; feeding on does not change it."""
        return CompressorState(self.tokens, self._tail.clone())

    def restore(self, state: CompressorState) -> None:
        """Continues from a snapshot, whatever was fed before."""
        self.tokens, self._tail = state.tokens, state.kv_score.clone()

    def rollback(self, tokens: int) -> int:
        """Forgets the last `tokens` tokens (rejected drafts); returns how many entries handed out are thereby void.

        Raises ValueError when the rows needed to go on from there are no longer remembered.
        """
        target = self.tokens - tokens
        first = self.tokens - len(self._tail)
        if tokens < 0 or target < 0 or self._overlap_start(target) < first:
            raise ValueError(
                f"cannot roll back {tokens} of {self.tokens} tokens: rows before {first} are forgotten; "
                f"construct the compressor with rollback_limit >= {tokens}"
            )
        void = self.entries - target // self.ratio
        self._tail = self._tail[: target - first]
        self.tokens = target
        return void

    def _overlap_start(self, tokens: int) -> int:
        """First token that the entry after `tokens` tokens pools."""
        overlap = self.ratio if self.ratio == OVERLAP_RATIO else 0
        return max(0, tokens // self.ratio * self.ratio - overlap)

    def _first_needed(self, tokens: int) -> int:
        return self._overlap_start(max(0, tokens - self.rollback_limit))
