"""Times kernels one launch at a time from cold caches, in turn, so that all of them see the same clocks.

Before a launch the L2 cache is overwritten, as the rest of a layer's step overwrites it between two reads of an index
cache. A launch is the replay of a CUDA graph of one call, with events around it: the host's time does not count.

Kernels that fill the tensor cores for a millisecond are timed under load instead, replay after replay: within a few
tenths of a second the power limit lowers the card's clocks, and a rate measured before that is one no prefill keeps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from statistics import median
from typing import Any

import torch

from .row import FP8, CeilingName, Ceilings, Row

FLUSH_BYTES = 512 << 20
"""Several times the L2 cache; on an H200 writing them takes 0.15 ms, longer than the host takes to enqueue a replay."""
LOAD_SECONDS = 0.4
"""How long a kernel is under load; the second half counts."""
ROUNDS = 21
WARM_UP = 4
LOADED_REPLAYS = 8


@dataclass(frozen=True)
class Contender:
    """A kernel ready to run. `launches` are equal calls on different memory, together too much for the L2 cache.

    result_bytes: what a call allocates as its result; `extra_bytes` leaves it out.
    """

    kernel: str
    format: str
    shape: str
    launches: Sequence[Callable[[], Any]]
    bytes: int
    flops: int
    ceiling: CeilingName
    result_bytes: int = 0
    note: str = ""


class Stopwatch:
    """Times single launches from cold caches."""

    def __init__(self) -> None:
        self.scratch = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def time_us(self, graph: torch.cuda.CUDAGraph) -> float:
        """Microseconds between the events around one replay."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self.scratch.zero_()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3

    def loaded_us(self, graph: torch.cuda.CUDAGraph) -> float:
        """Microseconds a replay takes among replays that have loaded the card for LOAD_SECONDS / 2 or more."""
        taken: list[float] = []
        while sum(taken) < LOAD_SECONDS * 1e6:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(LOADED_REPLAYS):
                graph.replay()
            end.record()
            end.synchronize()
            taken.append(float(start.elapsed_time(end)) * 1e3)
        return median(taken[len(taken) // 2 :]) / LOADED_REPLAYS


def compare(contenders: Sequence[Contender], ceilings: Ceilings, rounds: int = ROUNDS) -> list[Row]:
    """Rows of contenders that are measured in turn, round by round. One that fails gets a row that says why."""
    graphs: list[list[torch.cuda.CUDAGraph]] = []
    extra: list[int | None] = []
    notes: list[str] = []
    for contender in contenders:
        try:
            contender.launches[0]()
            more = extra_bytes(contender.launches[0], contender.result_bytes)
            graphs.append([capture(launch) for launch in contender.launches])
            extra.append(more)
            notes.append(contender.note)
        except (RuntimeError, ValueError, ImportError, AttributeError, TypeError, AssertionError) as error:
            torch.cuda.synchronize()
            graphs.append([])
            extra.append(None)
            notes.append(f"not run: {type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:160]}")
    times = _in_turn(contenders, graphs, rounds)
    middle = [median(found) if found else None for found in times]
    fp8 = {(c.kernel, c.shape): us for c, us in zip(contenders, middle, strict=True) if c.format == FP8 and us}
    return [
        Row(
            kernel=contender.kernel,
            format=contender.format,
            shape=contender.shape,
            us=us,
            bytes=contender.bytes,
            flops=contender.flops,
            share_of_ceiling=share(contender, us, ceilings) if us else None,
            ratio_to_fp8=us / fp8[contender.kernel, contender.shape]
            if us and (contender.kernel, contender.shape) in fp8
            else None,
            extra_bytes=more,
            note=note,
        )
        for contender, us, more, note in zip(contenders, middle, extra, notes, strict=True)
    ]


def _in_turn(
    contenders: Sequence[Contender], graphs: Sequence[Sequence[torch.cuda.CUDAGraph]], rounds: int
) -> list[list[float]]:
    """Microseconds of every contender that has graphs, round by round."""
    stopwatch = Stopwatch()
    times: list[list[float]] = [[] for _ in contenders]
    rotations = [cycle(made) for made in graphs]
    for turn in range(WARM_UP + rounds):
        for number, rotation in enumerate(rotations):
            if not graphs[number] or contenders[number].ceiling == "matmul":
                continue
            took = stopwatch.time_us(next(rotation))
            if turn >= WARM_UP:
                times[number].append(took)
    for number, contender in enumerate(contenders):
        if graphs[number] and contender.ceiling == "matmul":
            times[number].append(stopwatch.loaded_us(graphs[number][0]))
    return times


def share(contender: Contender, us: float, ceilings: Ceilings) -> float:
    """Time at the ceiling over time taken."""
    count = contender.flops if contender.ceiling == "matmul" else contender.bytes
    return ceilings.time_us(contender.ceiling, count) / us


def capture(launch: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """A graph of one call."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    return graph


def extra_bytes(launch: Callable[[], Any], result_bytes: int) -> int:
    """Peak memory that a call allocates beyond its result."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = launch()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    del result
    return max(0, peak - before - result_bytes)
