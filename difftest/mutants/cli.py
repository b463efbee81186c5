"""The commands `difftest mutants list`, `run` and `matrix`."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from ..policy import load_policy
from ..report import listing
from ..verdict import explain_failure, judge
from . import blamed, matrix, page
from .bench import Bench
from .gates import CLEAR
from .mutant import Mutant
from .registry import PATHS, find, mutants

AGREES, DISAGREES, USAGE = 0, 1, 2

app = typer.Typer(no_args_is_help=True, help="Faults planted into a path, and which gate catches which.")
console, errors = Console(), Console(stderr=True)


@app.command("list")
def list_command(
    path: Annotated[str, typer.Option(help="Only mutants that have a seed in this path.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """List mutants: name, report, stage, paths, what is wrong."""
    rows = [
        {"mutant": m.name, "report": m.report, "stage": m.stage, "paths": " ".join(m.seeds), "says": m.says}
        for m in mutants(path).values()
    ]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    else:
        listing.show(rows, console)


@app.command("run")
def run_command(
    name: Annotated[str, typer.Argument(help="A mutant of `difftest mutants list`.")],
    path: Annotated[str, typer.Option(help="Path it is planted in.")] = PATHS[0],
    policy: Annotated[str, typer.Option(help="strict, default, exploratory, or a TOML file.")] = "default",
    as_json: Annotated[bool, typer.Option("--json", help="Print the row of the matrix as JSON.")] = False,
) -> None:
    """Run one mutant and show what every gate says. Exit code 0 if some gate catches it, 1 if none does."""
    try:
        mutant, chosen = find(name), load_policy(policy)
        _check_path(mutant, path)
    except ValueError as error:
        _stop(USAGE, str(error))
    made = Bench().compare(mutant, path)
    row = matrix.row_of(made, mutant, path, chosen)
    if as_json:
        typer.echo(json.dumps({**asdict(row), "blame": blamed.sentence(made, chosen)}, indent=2))
        raise typer.Exit(AGREES if row.killed else DISAGREES)
    [verdict] = judge(made.renamed, chosen)
    lines = [
        f"{mutant.name} ({mutant.report}) in {path}, at {row.stage_seeded}: {mutant.says}",
        explain_failure(verdict, made.renamed).rpartition("\n  run again")[0] or str(verdict),
        f"caught by: {', '.join(row.killed_by) or 'nothing'}",
        f"calc_diff {row.calc_diff:.3g} on the stage, {row.calc_diff_score:.3g} on the scores; recall {row.recall:.3g}",
        f"blame: {blamed.sentence(made, chosen)}",
    ]
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(AGREES if row.killed else DISAGREES)


def _check_path(mutant: Mutant, path: str) -> None:
    if path not in mutant.seeds:
        raise ValueError(f"mutant {mutant.name} has no seed in {path}: choose --path {' or '.join(mutant.seeds)}")


@app.command("matrix")
def matrix_command(
    name: Annotated[list[str] | None, typer.Option(help="Only this mutant (repeatable); nothing is written.")] = None,
    path: Annotated[list[str] | None, typer.Option(help="Only this path (repeatable); nothing is written.")] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Compare with the kept rows instead of writing them; no blame.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Where the rows are kept.")] = matrix.MATRIX,
) -> None:
    """Run every mutant through every gate, and write the matrix and its page. Exit code 1 if a gate lost a mutant."""
    try:
        kept = matrix.load(out) if out.is_file() else []
        for one in name or []:
            find(one)
    except ValueError as error:
        _stop(USAGE, str(error))
    policy = load_policy("default")
    rows = matrix.build(
        name or (),
        path or PATHS,
        clear=1.0 if check else CLEAR,
        say=None if check else lambda made: blamed.sentence(made, policy),
        on_row=lambda row: errors.print(f"{row.mutant} {row.path}: {row.stage_named or 'survives'}", highlight=False),
    )
    worse = matrix.lost(kept, rows)
    alive = [f"{row.mutant} in {row.path}: survives every gate" for row in rows if not row.killed]
    if not check and not name and not path:
        matrix.save(rows, out)
        page.write(rows)
    right = sum(row.named_right for row in rows)
    caught = len(rows) - len(alive)
    lines = [*worse, *alive, f"{caught} of {len(rows)} caught, {right} named at the stage at fault"]
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(DISAGREES if worse or alive else AGREES)


def _stop(code: int, message: str) -> NoReturn:
    errors.print(f"difftest: {message}", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(code)
