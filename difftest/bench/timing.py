"""Times kernels by replaying CUDA graphs in turn, so that all of them see the same clocks, and their extra memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from .row import FP8, CeilingName, Ceilings, Row

GRAPH_US = 4000.0
"""Length a graph is given by repeating its launches: long beside the gap between two replays."""
MOST_LAUNCHES = 2000
ROUNDS = 9
WARM_UP = 2


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


@dataclass
class _Captured:
    graph: torch.cuda.CUDAGraph
    launches: int
    extra: int

    def time_us(self) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3 / self.launches


def compare(contenders: Sequence[Contender], ceilings: Ceilings, rounds: int = ROUNDS) -> list[Row]:
    """Rows of contenders that are measured in turn, round by round. One that fails gets a row that says why."""
    captured: list[_Captured | None] = []
    notes: list[str] = []
    for contender in contenders:
        try:
            captured.append(capture(contender.launches, contender.result_bytes))
            notes.append(contender.note)
        except (RuntimeError, ValueError, ImportError, AttributeError, TypeError, AssertionError) as error:
            torch.cuda.synchronize()
            captured.append(None)
            notes.append(f"not run: {type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:160]}")
    times: list[list[float]] = [[] for _ in contenders]
    for turn in range(WARM_UP + rounds):
        for number, ready in enumerate(captured):
            if ready is not None:
                took = ready.time_us()
                if turn >= WARM_UP:
                    times[number].append(took)
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
            extra_bytes=ready.extra if ready else None,
            note=note,
        )
        for contender, us, ready, note in zip(contenders, middle, captured, notes, strict=True)
    ]


def share(contender: Contender, us: float, ceilings: Ceilings) -> float:
    """Time at the ceiling over time taken."""
    count = contender.flops if contender.ceiling == "matmul" else contender.bytes
    return ceilings.time_us(contender.ceiling, count) / us


def capture(launches: Sequence[Callable[[], Any]], result_bytes: int = 0) -> _Captured:
    """A graph of the launches, repeated until it lasts about GRAPH_US; the first calls, which build, run outside it."""
    launches[0]()
    torch.cuda.synchronize()
    extra = extra_bytes(launches[0], result_bytes)
    once = _eager_us(launches)
    repeats = max(1, min(round(GRAPH_US / once), MOST_LAUNCHES // len(launches)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for launch in launches:
                launch()
    return _Captured(graph, repeats * len(launches), extra)


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


def _eager_us(launches: Sequence[Callable[[], Any]]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for launch in launches:
        launch()
    end.record()
    end.synchronize()
    return max(1.0, float(start.elapsed_time(end)) * 1e3)
