"""The command `difftest soak`."""

import json
import os
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .paths.base import get_path
from .policy import load_policy
from .soak import PATHS, Soaked, soak

AGREES, DISAGREES, USAGE, CANNOT_JUDGE = 0, 1, 2, 125
MINUTES = 30.0

console, errors = Console(), Console(stderr=True)


def soak_command(
    seeds: Annotated[int, typer.Option(min=1, help="Clean seeds to run; every seed is another small case.")] = 1000,
    first: Annotated[int, typer.Option(min=0, help="The first seed.")] = 0,
    path: Annotated[list[str] | None, typer.Option(help="Only this path (repeatable); all CPU paths.")] = None,
    minutes: Annotated[float, typer.Option(min=0.0, help="Stops after so long and says how far it came.")] = MINUTES,
    jobs: Annotated[int, typer.Option(min=0, help="Processes; 0: one a core.")] = 0,
    policy: Annotated[str, typer.Option(help="strict, default, exploratory, or a TOML file.")] = "default",
    as_json: Annotated[bool, typer.Option("--json", help="Print the counts as JSON.")] = False,
) -> None:
    """Run clean seeds through every path: not one verdict may be `bug`.

    Exit codes: 0 no false alarm, 1 a false alarm (its recipe is printed), 125 the time was up before the last seed.
    """
    paths = path or list(PATHS)
    try:
        load_policy(policy)
        for name in paths:
            get_path(name)
    except ValueError as error:
        errors.print(f"difftest: {error}", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(USAGE) from error
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=errors, transient=True) as bar:
        task = bar.add_task("soaking", total=seeds)
        made = soak(
            range(first, first + seeds),
            paths,
            policy=policy,
            jobs=jobs or os.cpu_count() or 1,
            seconds=60 * minutes,
            on_block=lambda total: bar.update(task, completed=total.seeds),
        )
    _show(made, seeds, len(paths), as_json)
    raise typer.Exit(DISAGREES if made.alarms else CANNOT_JUDGE if made.seeds < seeds else AGREES)


def _show(made: Soaked, seeds: int, paths: int, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(asdict(made), indent=2))
        return
    counts = ", ".join(f"{answer} {count}" for answer, count in sorted(made.answers.items()))
    short = "" if made.seeds == seeds else f" of {seeds}, then the time was up"
    lines = [f"false alarm: {alarm}" for alarm in made.alarms]
    lines.append(f"{made.seeds} seeds{short}, {paths} paths, {made.layers} layers in {made.seconds:.0f} s: {counts}")
    lines.append(f"{len(made.alarms)} false alarms")
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
