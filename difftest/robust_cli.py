"""`difftest robust`: checks that no single comparison shows."""

import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

if TYPE_CHECKING:
    from .verdict import Verdict

AGREES, BUG, USAGE, CANNOT_JUDGE = 0, 1, 2, 125


def robust_command(
    path: Annotated[
        list[str] | None, typer.Option(help="Also run this path twenty times (repeatable); name or name:option=value.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print verdicts as JSON.")] = False,
) -> None:
    """Check that kernels give the same bits every time, in any batch and graph, and mind only their own memory."""
    import torch

    errors, console = Console(stderr=True), Console()
    if device not in ("auto", "cpu", "cuda"):
        _stop(errors, USAGE, f"--device {device} is none of auto, cpu and cuda")
    if device == "cuda" and not torch.cuda.is_available():
        _stop(errors, CANNOT_JUDGE, "--device cuda, but torch sees no CUDA device; use --device cpu")
    chosen = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    verdicts = []
    try:
        for found in _verdicts(chosen, path or []):
            verdicts.append(found)
            if not as_json:
                line = f"{found.path:<20} {found.stage or '':<12} {found.rule:<26} {found.text}"
                console.print(line, markup=False, highlight=False, soft_wrap=True)
    except ValueError as error:
        _stop(errors, USAGE, str(error))
    if as_json:
        sys.stdout.write(json.dumps([found.to_json() for found in verdicts], indent=2) + "\n")
    codes = {found.exit_code for found in verdicts}
    raise typer.Exit(BUG if BUG in codes else CANNOT_JUDGE if CANNOT_JUDGE in codes else AGREES)


def _verdicts(device: str, paths: list[str]) -> Iterator["Verdict"]:
    from .paths.base import get_path
    from .robust import paths as repeated
    from .robust import reads, writes

    for spec in paths:
        get_path(spec)
    for read in reads.reads():
        yield from reads.check(read, device)
    yield from writes.check(device)
    for spec in paths:
        yield from repeated.check(spec, device)


def _stop(errors: Console, code: int, message: str) -> None:
    errors.print(f"difftest: {message}", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(code)
