"""Chooses the tile of a read by measuring every candidate on the caller's own operands, and records the choice.

Never runs by itself: a server tunes the shapes that it will serve before it captures graphs, a benchmark before it
measures. Reads then find the record.
"""

from collections.abc import Callable
from statistics import median

import torch

from .tile import Kind, Tile, candidates, record

FLUSH_BYTES = 256 << 20
"""Written between two launches, so that none finds its keys in the L2 cache."""
LAUNCHES = 9


def tune(kind: Kind, rows: int, width: int, group: int, launch: Callable[[Tile], object], device: torch.device) -> Tile:
    """The fastest candidate for a shape on `device` (a CUDA device), recorded for this and later processes.

    launch: runs the read with the tile given, on operands of `rows` rows, `width` columns and `group` queries a
    request. A candidate that the GPU cannot hold is passed over. RuntimeError while a graph is being captured, and if
    no candidate runs.
    """
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a CUDA graph is being captured and tuning has to wait for the GPU: tune before the capture")
    scratch = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
    times: dict[Tile, float] = {}
    failed = ""
    for tile in candidates(kind, group):
        try:
            times[tile] = _time(lambda tile=tile: launch(tile), scratch)  # type: ignore[misc]
        except (RuntimeError, ValueError) as error:
            failed = str(error)
    if not times:
        raise RuntimeError(f"no candidate tile runs here for {kind} {rows} x {width}: {failed}")
    best = min(times, key=times.__getitem__)
    record(kind, rows, width, group, device, best)
    return best


def _time(launch: Callable[[], object], scratch: torch.Tensor) -> float:
    """Median milliseconds of a launch from cold caches, replayed as a graph so that the host's time does not count."""
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    taken = []
    for _ in range(LAUNCHES):
        scratch.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        taken.append(float(start.elapsed_time(end)))
    return median(taken)
