"""`difftest bench`: measures the index kernels on a GPU."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

CANNOT_JUDGE, USAGE = 125, 2


def bench_command(
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the numbers to this file.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer shapes and rounds; no tuning.")] = False,
    memory_fraction: Annotated[
        float, typer.Option(help="Share of the card that the caches get, for the capacity answer.")
    ] = 0.2,
) -> None:
    """Measure ceilings, then SGLang's fp8 index kernels and the bf16 ones side by side on this GPU."""
    import torch

    errors = Console(stderr=True)
    if not 0 < memory_fraction <= 1:
        _stop(errors, USAGE, f"--memory-fraction {memory_fraction} is no share of the card: give one above 0 up to 1")
    if json_file is not None and not json_file.resolve().parent.is_dir():
        _stop(errors, USAGE, f"--json {json_file}: there is no folder {json_file.parent}; make it first")
    if not torch.cuda.is_available():
        _stop(errors, CANNOT_JUDGE, "no CUDA device here, and the bench measures GPU kernels; run it on a GPU")
    from .bench.run import run
    from .bench.text import show

    with errors.status("") as status:
        bench = run(quick, memory_fraction, lambda text: status.update(f"bench: {text}"))
    show(bench, Console(width=None if sys.stdout.isatty() else 160))
    if json_file is not None:
        bench.save(json_file)


def _stop(errors: Console, code: int, message: str) -> None:
    errors.print(f"difftest: {message}", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(code)
