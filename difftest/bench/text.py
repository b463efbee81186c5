"""The bench for people."""

from rich.console import Console

from ..report import listing
from .row import table
from .run import Bench

SHOWN_FACTS = ("gpu", "torch", "cuda", "triton", "sglang", "sgl-deep-gemm")


def show(bench: Bench, console: Console) -> None:
    """Prints versions, ceilings, one line a kernel, and the two answers."""
    best = bench.ceilings
    facts = ", ".join(f"{name} {bench.environment[name]}" for name in SHOWN_FACTS if bench.environment.get(name))
    lines = (
        f"{bench.date}: {facts}",
        f"ceilings: read {best.read / 1e12:.2f} TB/s, copy {best.copy / 1e12:.2f} TB/s, "
        f"bf16 matmul {best.matmul / 1e12:.0f} TFLOP/s",
    )
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    listing.show(table(bench.rows), console)
    for line in (bench.throughput(), bench.capacity.sentence()):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
