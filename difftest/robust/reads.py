"""Checks of a read kernel: repeats, batches, graphs, poison, guards."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.score import contiguous_scores, paged_scores
from ..kernels.tile import Tile
from ..verdict import Verdict
from .finding import difference, same_bits, verdict
from .scene import GUARD, Scene, guarded_output, scene

REPEATS = 20
OTHER_POISON = (0x00, 0x7F)
"""Zeros, and bytes that read as 3.4e38 in bf16."""
SEED = 6

Scores = Callable[[Scene, Tensor], Tensor]
"""A read: writes every score of a scene into an fp32 [R, width] output, -inf past each row's length, and returns it."""


@dataclass(frozen=True)
class Read:
    """A way to read: its name, the keys of each request, rows a request, and the kernel."""

    name: str
    counts: tuple[int, ...]
    next_n: int
    scores: Scores


def paged(tile: Tile | None = None) -> Scores:
    def scores(s: Scene, out: Tensor) -> Tensor:
        return paged_scores(
            s.query, s.weight, s.cache, s.table, s.lengths, width=out.shape[1], out=out, next_n=s.next_n, tile=tile
        )

    return scores


def contiguous(tile: Tile | None = None) -> Scores:
    def scores(s: Scene, out: Tensor) -> Tensor:
        return contiguous_scores(s.query, s.weight, s.keys, s.lengths, width=out.shape[1], out=out, tile=tile)

    return scores


def reads() -> list[Read]:
    """Decode, two tokens a step, paged prefill of two requests, and contiguous prefill, by the kernels chosen here."""
    return [
        Read("decode", (0, 5, 64, 67, 300, 129), 1, paged()),
        Read("decode of two", (2, 70, 300, 129), 2, paged()),
        Read("paged prefill", (333, 70), 16, paged()),
        Read("contiguous prefill", (333,), 19, contiguous()),
    ]


def check(read: Read, device: str, repeats: int = REPEATS) -> Iterator[Verdict]:
    """Verdicts on one read on `device`: repeat, batch, poison, guards, and on a GPU graph."""
    s = scene(read.counts, read.next_n, device, SEED)
    base = _run(read, s)
    yield verdict(read.name, "score", "exercised", "" if bool(base.isfinite().any()) else "no score is finite")
    yield verdict(read.name, "score", f"{repeats} runs bitwise equal", _repeats(read, s, base, repeats))
    yield verdict(read.name, "score", "batch invariance", _alone(read, s, base))
    yield verdict(read.name, "score", "poison unseen", _poison(read, s, base))
    yield verdict(read.name, "score", "guards untouched", _guards(read, s, base))
    if device == "cuda":
        yield verdict(read.name, "score", "graph replay equals eager", _graph(read, s, base))


def _run(read: Read, s: Scene, fill: float = math.nan) -> Tensor:
    out = torch.full((len(s.query), s.width), fill, device=s.query.device)
    return read.scores(s, out)


def _repeats(read: Read, s: Scene, base: Tensor, repeats: int) -> str:
    for number in range(1, repeats):
        again = _run(read, s)
        if not same_bits(again, base):
            return f"run {number} and the first: {difference(again, base)}"
    return ""


def _alone(read: Read, s: Scene, base: Tensor) -> str:
    """Each request scored in a batch of one; its rows one by one too where a request has several."""
    for number, count in enumerate(s.counts):
        if not count:
            continue
        one = s.request(number)
        rows = slice(number * s.next_n, (number + 1) * s.next_n)
        got = _run(read, one) if len(s.counts) > 1 else base
        if not same_bits(got, base[rows, :count].contiguous()):
            return f"request {number} alone and in its batch: {difference(got, base[rows, :count].contiguous())}"
        for row in range(s.next_n):
            single = Scene(
                one.query[row : row + 1], one.weight[row : row + 1], s.keys, s.cache, one.table,
                one.lengths[row : row + 1], one.counts, 1,
            )  # fmt: skip
            got = _run(read, single)
            want = base[rows][row : row + 1, :count].contiguous()
            if not same_bits(got, want):
                return f"row {row} of request {number} alone and in its batch: {difference(got, want)}"
    return ""


def _poison(read: Read, s: Scene, base: Tensor) -> str:
    """Other bytes in unread slots, pages and padding, and other numbers in the output, change nothing."""
    for byte in OTHER_POISON:
        got = _run(read, s.poisoned(byte), fill=GUARD)
        if not same_bits(got, base):
            return f"unused memory of bytes {byte:#04x} and of NaN: {difference(got, base)}"
    return ""


def _guards(read: Read, s: Scene, base: Tensor) -> str:
    buffer, out = guarded_output(base.shape[0], base.shape[1], base.device)
    read.scores(s, out)
    if not same_bits(out, base):
        return f"with a row stride of its own: {difference(out.contiguous(), base)}"
    out.fill_(GUARD)
    touched = buffer != GUARD
    if bool(touched.any()):
        first = touched.nonzero()[0].tolist()
        return f"{int(touched.sum())} elements around the output were written, the first at {first}"
    return ""


def _graph(read: Read, s: Scene, base: Tensor) -> str:
    out = torch.full_like(base, math.nan)
    read.scores(s, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        read.scores(s, out)
    for _ in range(2):
        out.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        if not same_bits(out, base):
            return f"replay and eager: {difference(out, base)}"
    return ""
