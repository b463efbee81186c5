"""Reads: index scores of decode steps and of long prefills, and the top-k that follows."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..kernels.layout import ENTRY_BYTES, ENTRY_DIM, PAGE_BYTES, PAGE_ENTRIES
from ..kernels.naive import gathered_scores
from ..kernels.score import contiguous_scores, paged_scores, tile_for
from ..kernels.tile import Tile, portable
from ..kernels.tune import tune
from . import fp8
from .capacity import FP8_ENTRY_BYTES
from .operands import HEADS, Pools, rows
from .row import FP8
from .timing import Contender

SCORE_BYTES = 4
INDEX_TOPK = 512
BF16, NAIVE, TRITON = "bf16", "bf16 naive", "bf16 Triton"
FLOPS = 2 * HEADS * ENTRY_DIM
"""Operations of one score."""


@dataclass(frozen=True)
class DecodeShape:
    """A decode step: entries that each request sees; `next_n` query rows a request."""

    name: str
    lengths: tuple[int, ...]
    next_n: int = 1


EVEN = 16_384
MIXED = (230_400,) * 4 + (2_115,) * 60
"""A few long requests among many short ones: the entries of 64 requests of 16,383."""

DECODE_SHAPES = (
    DecodeShape("64 x 65536", (65_536,) * 64),
    DecodeShape("64 x 16384", (EVEN,) * 64),
    DecodeShape("8 x 16384", (EVEN,) * 8),
    DecodeShape("1 x 262144", (262_144,)),
    DecodeShape("64 mixed", MIXED),
    DecodeShape("64 x 16384 next_n 2", (EVEN,) * 64, next_n=2),
)
NAIVE_SHAPE = "64 x 16384"
PREFILL_ROWS = 8192

Launch = Callable[[], Any]


def decode(pools: Pools, shape: DecodeShape, tuned: bool) -> list[Contender]:
    """The read of one decode step in both formats; with the naive gather for one shape."""
    tables = pools.tables(shape.lengths)
    operands = rows(len(shape.lengths) * shape.next_n, pools.generator)
    lengths = torch.tensor(shape.lengths, dtype=torch.int32, device="cuda").repeat_interleave(shape.next_n)
    width = tables[0].shape[1] * PAGE_ENTRIES
    out = torch.empty(len(lengths), width, device="cuda")

    def ours(table: Tensor, tile: Tile | None = None) -> Tensor:
        return paged_scores(
            operands.query, operands.weight, pools.bf16, table, lengths,
            width=width, out=out, fill=None, next_n=shape.next_n, tile=tile,
        )  # fmt: skip

    if tuned:
        tune("decode", len(lengths), width, shape.next_n, lambda tile: ours(tables[0], tile), out.device)
    tile = tile_for("decode", operands.query, width, shape.next_n)
    plain = portable("decode", shape.next_n, out.device)
    keys, scores = sum(shape.lengths), sum(shape.lengths) * shape.next_n
    rest = scores * SCORE_BYTES + operands.query.nbytes

    def contender(form: str, launches: Sequence[Launch], key_bytes: int, **more: Any) -> Contender:
        count = keys * key_bytes + rest
        return Contender("decode read", form, shape.name, launches, count, scores * FLOPS, "read", **more)

    found = [
        contender(FP8, later(lambda: fp8_decode(pools, operands.codes, operands.weight, tables, lengths, shape)),
                  FP8_ENTRY_BYTES, result_bytes=out.nbytes),
        contender(BF16, [partial(ours, table) for table in tables], ENTRY_BYTES, note=describe(tile)),
        contender(TRITON, [partial(ours, table, plain) for table in tables], ENTRY_BYTES, note=describe(plain)),
    ]  # fmt: skip
    if shape.name == NAIVE_SHAPE:
        request = torch.arange(len(lengths), device="cuda")
        found.append(
            contender(
                NAIVE,
                [lambda: gathered_scores(operands.query, operands.weight, pools.bf16, tables[0], lengths, request,
                                         width=width)],
                ENTRY_BYTES,
                result_bytes=out.nbytes,
            )
        )  # fmt: skip
    return found


def fp8_decode(
    pools: Pools, codes: Tensor, weight: Tensor, tables: Sequence[Tensor], lengths: Tensor, shape: DecodeShape
) -> list[Launch]:
    return fp8.paged_read(codes, weight, pools.fp8, tables, lengths, shape.next_n)


def later(make: Callable[[], list[Launch]]) -> list[Launch]:
    """The launches, or one that raises what making them raised: the row then says so."""
    try:
        return make()
    except Exception as error:
        caught = error

        def fail() -> None:
            raise RuntimeError(f"{type(caught).__name__}: {caught}")

        return [fail]


def describe(tile: Tile) -> str:
    """A tile in a few words."""
    if tile.kernel != "triton":
        return f"CUDA, {tile.kernel}"
    schedule = f"{tile.programs} persistent" if tile.programs else f"split {tile.split}"
    return f"{tile.group} x {tile.keys}, {tile.warps} warps, {tile.stages} stages, {schedule}"


def prefill(pools: Pools, tuned: bool) -> Iterator[list[Contender]]:
    """Scores of 8,192 rows over 8,192 keys: all of them, then causal ones; keys contiguous, then paged."""
    count = PREFILL_ROWS
    operands = rows(count, pools.generator)
    keys = torch.randn(count, ENTRY_DIM, device="cuda", generator=pools.generator).bfloat16()
    codes = keys.to(torch.float8_e4m3fn)
    out = torch.empty(count, count, device="cuda")
    cache = keys.view(torch.uint8).view(-1, PAGE_BYTES)
    table = torch.arange(len(cache), device="cuda", dtype=torch.int32)[None]
    full = torch.full((count,), count, dtype=torch.int32, device="cuda")
    causal = torch.arange(1, count + 1, dtype=torch.int32, device="cuda")

    def contiguous(lengths: Tensor, tile: Tile | None = None) -> Tensor:
        return contiguous_scores(
            operands.query, operands.weight, keys, lengths, width=count, out=out, fill=None, tile=tile
        )

    def paged(tile: Tile | None = None) -> Tensor:
        return paged_scores(
            operands.query, operands.weight, cache, table, full,
            width=count, out=out, fill=None, next_n=count, tile=tile,
        )  # fmt: skip

    if tuned:
        tune("prefill", count, count, count, lambda tile: contiguous(full, tile), out.device)
    best = tile_for("prefill", operands.query, count, count)
    variants = {BF16: best, TRITON: portable("prefill", count, out.device)}
    for name, lengths in (("8192 x 8192", full), ("8192 x 8192 causal", causal)):
        scores = int(lengths.sum())
        size = operands.query.nbytes + scores * SCORE_BYTES

        def contender(form: str, launches: Sequence[Launch], key: int, shape: str = name, scores: int = scores,
                      size: int = size, **more: Any) -> Contender:  # fmt: skip
            return Contender(
                "prefill read", form, shape, launches, size + count * key, scores * FLOPS, "matmul", **more
            )

        found = [
            contender(FP8, later(partial(fp8.contiguous_read, operands.codes, operands.weight, codes, lengths)),
                      FP8_ENTRY_BYTES, result_bytes=out.nbytes),
            *(contender(form, [partial(contiguous, lengths, tile)], ENTRY_BYTES,
                        note=describe(tile)) for form, tile in variants.items()),
        ]  # fmt: skip
        if lengths is full:
            found.append(contender("bf16 paged", [lambda: paged(best)], ENTRY_BYTES, note=describe(best)))
        yield found


def topk(pools: Pools) -> list[Contender]:
    """Top-k v2 of SGLang on scores of 64 x 16,384: the same kernel whatever the format of the keys."""
    table = pools.tables((EVEN,) * 64)[0]
    lengths = torch.full((64,), EVEN, dtype=torch.int32, device="cuda")
    scores = [torch.randn(64, EVEN, device="cuda", generator=pools.generator) for _ in range(16)]
    launches = later(lambda: fp8.topk(scores, lengths, table, INDEX_TOPK))
    return [Contender("top-k v2", "any", "64 x 16384", launches, scores[0].nbytes, 0, "read")]
