"""Mutants of `compressed`: pooling and its state."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..reference.inputs import CompressorInputs, LayerInputs, Span
from .adapters import both, pooled_after_drafts, pooled_in_batch, pooled_in_chunks, reported, with_part
from .bench_cases import CHUNKED, DECODE, RESUMED
from .mutant import Block, Mutant, Wrap

SENTINEL = 1e4
"""What a state ring holds that nobody restored."""

SMALL_RING = 6
"""Rows of a ring that is two short of the window it serves."""

LAST_CHANNELS = 16
PAD_FACTOR = 100.0


def window(change: Callable[[Tensor, int, int], Tensor]) -> Wrap:
    """change(rows of the window, first position, first position of the step) -> rows, after `read_window`."""

    def wrap(path: Any, original: Block) -> Block:
        def block(ring: Any, chunk: Tensor, chunk_start: int, start: int, stop: int) -> Tensor:
            return change(original(ring, chunk, chunk_start, start, stop).clone(), start, chunk_start)

        return block

    return wrap


def _zero_gate(rows: Tensor, start: int, chunk_start: int) -> Tensor:
    rows[: max(0, -start), rows.shape[1] // 2 :] = 0.0
    return rows


def no_overlap_at_step(rows: Tensor, start: int, chunk_start: int) -> Tensor:
    """The block before a step's first entry counts as missing."""
    if chunk_start > 0:
        rows[:4, rows.shape[1] // 2 :] = torch.finfo(torch.float32).min
    return rows


def _damaged_channels(rows: Tensor, start: int, chunk_start: int) -> Tensor:
    rows[-1, -LAST_CHANNELS:] = 0.0
    return rows


def _padding_pooled(rows: Tensor, start: int, chunk_start: int) -> Tensor:
    rows[-1] *= PAD_FACTOR
    return rows


def _bf16_state(rows: Tensor, start: int, chunk_start: int) -> Tensor:
    return rows.bfloat16().float()


def _small_ring(path: Any, original: Block) -> Block:
    def block(ratio: int, width: int, device: torch.device) -> Any:
        ring = original(ratio, width, device)
        ring.size = SMALL_RING
        ring.rows = ring.rows[:SMALL_RING].nan_to_num(nan=0.0)
        return ring

    return block


def _not_restored(path: Any, original: Block) -> Block:
    def block(inputs: LayerInputs, part: CompressorInputs, out: Tensor) -> Any:
        rings = original(inputs, part, out)
        for ring, given in zip(rings, inputs.prefix_entries, strict=True):
            if given:
                ring.rows.fill_(SENTINEL)
        return rings

    return block


def phase_of_chunk(path: Any, original: Block) -> Block:
    """The gate bias is indexed by the position in the step."""

    def block(part: CompressorInputs, ring: Any, chunk: Tensor, span: Span, out: Tensor) -> None:
        shift, halves = span.start % ring.ratio, len(part.ape) // ring.ratio
        ape = part.ape.unflatten(0, (halves, ring.ratio)).roll(shift, 1).flatten(0, 1)
        original(with_part(part, ape=ape), ring, chunk, span, out)

    return block


def _swapped_halves(path: Any, original: Block) -> Block:
    """The overlap columns are taken for the own block and the own ones for the block before."""

    def block(rows: Tensor, ratio: int) -> tuple[Tensor, Tensor]:
        before, own, gate_before, gate_own = rows.chunk(4, -1)
        swapped: tuple[Tensor, Tensor] = original(torch.cat((own, before, gate_own, gate_before), -1), ratio)
        return swapped

    return block


def _mean_pool(path: Any, original: Block) -> Block:
    return lambda kv, score, ape: kv.mean(1)


def no_bias(path: Any, original: Block) -> Block:
    return lambda kv, score, ape: original(kv, score, torch.zeros_like(ape))


POOL_MUTANTS = (
    Mutant(
        "c2-current-chunk",
        "C2",
        "compressed",
        CHUNKED,
        pooled_in_chunks(reported("c2-chunked-keys", "keys of the current chunk")),
        "the indexer holds the keys of the last chunk only",
    ),
    Mutant(
        "c2-chunk-restarts",
        "C2",
        "compressed",
        CHUNKED,
        pooled_in_chunks(reported("c2-chunked-keys", "each chunk a new request")),
        "every chunk is pooled as a request of its own",
    ),
    Mutant(
        "c3-last-channels",
        "C3",
        "compressed",
        CHUNKED,
        both("read_window", window(_damaged_channels)),
        "the last channels of a step's last token are damaged",
    ),
    Mutant(
        "c5-rejected-drafts",
        "C5",
        "compressed",
        CHUNKED,
        pooled_after_drafts(reported("c5-rejected-drafts", "ring of eight rows")),
        "rejected draft tokens stay in the ring",
    ),
    Mutant("c6-small-ring", "C6", "compressed", CHUNKED, both("new_ring", _small_ring), "ring rows alias"),
    Mutant(
        "c7-resume",
        "C7",
        "compressed",
        RESUMED,
        both("read_window", window(no_overlap_at_step)),
        "the first entry after a resume forgets the block before",
    ),
    Mutant(
        "c8-padding-pooled",
        "C8",
        "compressed",
        CHUNKED,
        both("read_window", window(_padding_pooled)),
        "a padding row is pooled as if real",
    ),
    Mutant(
        "c9-packed-windows",
        "C9",
        "compressed",
        CHUNKED,
        pooled_in_batch(reported("c4-batch-neighbours", "windows over the packed buffer")),
        "a request's first block overlaps its neighbour's last",
    ),
    Mutant(
        "c11-state-lost",
        "C11",
        "compressed",
        DECODE,
        both("start_requests", _not_restored),
        "the state ring is not restored with the cache",
    ),
    Mutant(
        "c13-phase-of-chunk",
        "C13",
        "compressed",
        CHUNKED,
        both("pool_span", phase_of_chunk),
        "the gate bias goes by position in the step",
    ),
    Mutant(
        "k2-missing-block-counts",
        "K2",
        "compressed",
        CHUNKED,
        both("read_window", window(_zero_gate)),
        "the block before token 0 weighs in",
    ),
    Mutant(
        "k2-swapped-halves",
        "K2",
        "compressed",
        CHUNKED,
        both("split_window", _swapped_halves),
        "overlap and own columns swapped",
    ),
    Mutant("k3-no-gate-bias", "K3", "compressed", CHUNKED, both("pool", no_bias), "the gate bias is never added"),
    Mutant("k2-mean-pool", "K2", "compressed", CHUNKED, both("pool", _mean_pool), "slots averaged, gates unread"),
    Mutant(
        "d15-bf16-state",
        "D15",
        "compressed",
        CHUNKED,
        both("read_window", window(_bf16_state)),
        "raw rows kept in bf16, undeclared",
    ),
)
