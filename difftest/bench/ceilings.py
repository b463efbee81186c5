"""What the card does at best: read-only bandwidth, copy bandwidth, bf16 products."""

from collections.abc import Callable
from statistics import median

import torch

from .row import Ceilings
from .timing import Stopwatch, capture

ELEMENTS = 1 << 29
"""Fp32 elements of a bandwidth buffer: 2 GiB, far more than any cache."""
SIDE = 8192
"""Rows and columns of the bf16 product."""
ROUNDS = 15
WARM_UP_ROUNDS = 5
"""Launches before the measured ones: the card's clocks settle under load."""


def measure() -> Ceilings:
    """All three: bandwidths from single launches, the product under load (`timing.py` says why)."""
    launch = product()
    launch()
    return Ceilings(*_bandwidths(), 2 * SIDE**3 / (Stopwatch().loaded_us(capture(launch)) * 1e-6))


def _bandwidths() -> tuple[float, float]:
    """Bytes per second of a sum, and of a kernel that reads one buffer and writes another."""
    source = torch.randn(ELEMENTS, device="cuda")
    target = torch.empty_like(source)
    read, copy = _seconds(source.sum), _seconds(lambda: torch.neg(source, out=target))
    return source.nbytes / read, 2 * source.nbytes / copy


def product() -> Callable[[], object]:
    """A call that multiplies two random bf16 matrices of SIDE x SIDE."""
    a, b = (torch.randn(SIDE, SIDE, device="cuda").bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.matmul(a, b, out=out)


def _seconds(launch: Callable[[], object]) -> float:
    launch()
    stopwatch, graph = Stopwatch(), capture(launch)
    times = [stopwatch.time_us(graph) for _ in range(WARM_UP_ROUNDS + ROUNDS)][WARM_UP_ROUNDS:]
    return median(times) * 1e-6
