"""`difftest recall sweep`: parses, calls one function and chooses the exit code."""

import json
import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NoReturn, TypeVar

import typer
from rich.console import Console

console = Console()
errors = Console(stderr=True)

FILE_WIDTH = 200
"""Columns of tables that are written into a file or a pipe: nothing is cut there."""
Number = TypeVar("Number", int, float)
USAGE, CANNOT_JUDGE, INTERRUPTED = 2, 125, 130


class Device(StrEnum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


def stop(code: int, message: str) -> NoReturn:
    """Prints one sentence on stderr and exits."""
    errors.print(f"difftest: {message}", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(code)


def choose_device(device: Device) -> str:
    import torch

    if device is Device.auto:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device is Device.cuda and not torch.cuda.is_available():
        stop(CANNOT_JUDGE, "--device cuda, but torch sees no CUDA device; use --device cpu or a CUDA build of torch")
    return device.value


def sweep_main(
    path: Annotated[
        list[str] | None, typer.Option(help="Sweep only this path (repeatable); name or name:option=value.")
    ] = None,
    lengths: Annotated[
        list[str] | None, typer.Option("--length", "--lengths", help="Tokens (repeatable, or with commas).")
    ] = None,
    depths: Annotated[
        list[str] | None,
        typer.Option("--depth", "--depths", help="Share of what the row sees, 0 to 1 (repeatable, or with commas)."),
    ] = None,
    layers: Annotated[int, typer.Option(help="How many layers, evenly spread; 3 if not given.")] = 0,
    seeds: Annotated[int, typer.Option(help="How many seeds; 3 if not given.")] = 0,
    distractors: Annotated[
        list[str] | None,
        typer.Option(
            "--distractor",
            "--distractors",
            help="gaussian (if none), near-duplicate, heavy-tailed, outlier-heavy, adversarial or all (repeatable).",
        ),
    ] = None,
    ablation: Annotated[
        list[str] | None,
        typer.Option(help="topk, formats, hadamard, bugs or all (repeatable): swept beside the paths."),
    ] = None,
    device: Annotated[Device, typer.Option(help="Where paths run.")] = Device.auto,
    profile: Annotated[
        str, typer.Option(help="default, or full: to 1,048,576 tokens, 9 depths, all distractors.")
    ] = "default",
    model: Annotated[str, typer.Option(help="v4-flash, v4-pro or the path of a config.json.")] = "v4-flash",
    out: Annotated[Path | None, typer.Option(help="Folder of the results; an existing one is resumed.")] = None,
    picture: Annotated[list[str] | None, typer.Option(help="svg or png (repeatable); svg if none.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print curves and conclusion as JSON.")] = False,
) -> None:
    """Plant a needle at every length and depth, and see which paths still select it, at which rank and margin.

    Exit codes: 0 no path loses a needle that its number formats must keep; 1 one does; 125 cannot judge; 2 usage;
    130 interrupted (the same command with the same --out resumes). Ablations never decide the exit code.
    """
    from . import sweep
    from .sweep_output import to_json, write_outputs

    try:
        options = sweep.options_of(
            path or [], numbers(lengths, int, "--length"), numbers(depths, float, "--depth"), layers, seeds,
            words(distractors), words(ablation), choose_device(device), profile, model,
        )  # fmt: skip
        formats = check_pictures(picture or [])
    except (ValueError, FileNotFoundError) as error:
        stop(USAGE, str(error))
    for name, why in options.skipped.items():
        errors.print(f"{name} is left out: {why}", markup=False, highlight=False, soft_wrap=True)
    folder = out or Path("runs") / time.strftime("sweep-%Y%m%d-%H%M%S")
    try:
        outcome = sweep.run(options, folder, errors)
        written = write_outputs(outcome, folder, formats, errors)
    except ValueError as error:
        stop(USAGE, str(error))
    except OSError as error:
        stop(USAGE, f"the results cannot be written: {error}; give another --out")
    except KeyboardInterrupt:
        stop(INTERRUPTED, f"interrupted; the same command with --out {folder} resumes")
    if as_json:
        facts = {"device": options.device, "skipped_paths": options.skipped}
        sys.stdout.write(json.dumps({**facts, **to_json(outcome, folder)}, indent=2) + "\n")
    else:
        show(outcome, written)
    missing = any(name in options.skipped for name in path or [])
    raise typer.Exit(outcome.exit_code or (CANNOT_JUDGE if missing else 0))


def show_main(
    directory: Annotated[Path, typer.Argument(help="The --out of a sweep, finished or not.")],
    picture: Annotated[list[str] | None, typer.Option(help="svg or png (repeatable); svg if none.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print curves and conclusion as JSON.")] = False,
) -> None:
    """Show a sweep again from its records alone: grids, conclusion, curves and pictures. Nothing is run.

    Exit codes are those of the sweep.
    """
    from . import sweep
    from .sweep_output import to_json, write_outputs

    try:
        outcome = sweep.read(directory)
        written = write_outputs(outcome, directory, check_pictures(picture or []), errors)
    except ValueError as error:
        stop(USAGE, str(error))
    if as_json:
        sys.stdout.write(json.dumps(to_json(outcome, directory), indent=2) + "\n")
    else:
        show(outcome, written)
    raise typer.Exit(outcome.exit_code)


def words(values: list[str] | None) -> list[str]:
    """The words of a repeatable option whose values may hold several, with commas."""
    return [word.strip() for value in values or [] for word in value.split(",") if word.strip()]


def numbers(values: list[str] | None, kind: type[Number], option: str) -> list[Number]:
    """The numbers of such an option. ValueError names what is none."""
    found = []
    for word in words(values):
        try:
            found.append(kind(word))
        except ValueError as error:
            raise ValueError(f"{option} {word!r} is no {'whole ' if kind is int else ''}number") from error
    return found


def check_pictures(names: list[str]) -> tuple[str, ...]:
    for name in names:
        if name not in ("svg", "png"):
            raise ValueError(f"--picture {name!r} is neither svg nor png")
    return tuple(dict.fromkeys(names)) or ("svg",)


def show(outcome: object, written: list[Path]) -> None:
    from .conclusion import conclusion
    from .sweep import SweepOutcome
    from .sweep_report import show_grid, show_summary

    assert isinstance(outcome, SweepOutcome)
    tables = console if console.is_terminal else Console(width=FILE_WIDTH)
    show_grid(outcome.cells, tables)
    show_summary(outcome.cells, tables)
    console.print()
    for line in conclusion(outcome.curves, outcome.cells):
        console.print(line.replace("**", ""), markup=False, highlight=False, soft_wrap=True)
    console.print()
    if outcome.measured:
        text = f"{outcome.measured:,} of {len(outcome.cells):,} needles measured in {outcome.seconds:.1f} s"
        console.print(text, highlight=False)
    for file in written:
        console.print(str(file), markup=False, highlight=False, soft_wrap=True)
