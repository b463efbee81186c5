"""The `difftest` command. Each subcommand is thin: it parses, calls one function and chooses the exit code."""

import json
import os
import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from .baseline_cli import app as baseline_app
from .bench_cli import bench_command
from .data_cli import capture_app, census_command, weights_command
from .diagnose.bisect_cli import bisect_command
from .diagnose.blame_cli import blame_command
from .diagnose.shrink_cli import replay_command, shrink_command
from .mutants.cli import app as mutants_app
from .recall.cli import app as recall_app
from .report_cli import report_command
from .robust_cli import robust_command
from .scale_cli import cluster_command, merge_command
from .soak_cli import soak_command

AGREES, DISAGREES, USAGE, CANNOT_JUDGE, HARNESS_ERROR = 0, 1, 2, 125, 128

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    help="Layer-by-layer differential tests for DeepSeek sparse-attention indexers.",
)
WIDTH = None if sys.stdout.isatty() else 120
"""Columns of output that goes to a file, where Rich would assume 80."""

console = Console(width=WIDTH)
errors = Console(stderr=True)


class Device(StrEnum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class What(StrEnum):
    cases = "cases"
    paths = "paths"
    stages = "stages"


def stop(code: int, message: str) -> NoReturn:
    """Prints one sentence on stderr and exits."""
    errors.print(f"difftest: {message}", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(code)


def choose_device(device: Device) -> str:
    import torch

    if device is Device.auto:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device is Device.cuda and not torch.cuda.is_available():
        stop(
            CANNOT_JUDGE,
            "--device cuda, but torch sees no CUDA device; install a CUDA build of torch or use --device cpu",
        )
    return device.value


@app.command("run")
def run_command(
    profile: Annotated[str, typer.Option(help="smoke, default, full or gpu: which cases run.")] = "default",
    case: Annotated[
        list[str] | None, typer.Option(help="Run only this case (repeatable); see `difftest list cases`.")
    ] = None,
    path: Annotated[
        list[str] | None, typer.Option(help="Run only this path (repeatable); name or name:option=value.")
    ] = None,
    layer: Annotated[list[int] | None, typer.Option(help="Run only this layer (repeatable).")] = None,
    device: Annotated[Device, typer.Option(help="Where paths run.")] = Device.auto,
    out: Annotated[Path | None, typer.Option(help="New directory for run.json, records.jsonl and traces.")] = None,
    policy: Annotated[str, typer.Option(help="strict, default, exploratory, or a TOML file.")] = "default",
    keep: Annotated[str, typer.Option(help="Which traces to keep: all, failed or none.")] = "failed",
    seed: Annotated[int, typer.Option(help="Added to every case's seed: other data, same cases.")] = 0,
    by_layer: Annotated[bool, typer.Option("--by-layer", help="One column a path and layer.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print verdicts as JSON; progress goes to stderr.")] = False,
) -> None:
    """Run cases through paths, layer by layer, and say which agree, which do not, at which stage, and why."""
    from . import session

    try:
        request = session.Request(
            profile, case or [], path or [], layer or [], choose_device(device), policy, keep, seed
        )
        plan, chosen = session.plan(request)
    except ValueError as error:
        stop(USAGE, str(error))
    folder = out or Path("runs") / time.strftime("%Y%m%d-%H%M%S")
    try:
        outcome = session.run(plan, chosen, folder, errors if as_json else console)
    except FileExistsError as error:
        stop(USAGE, str(error))
    _show(outcome, by_layer, as_json)


@app.command("judge")
def judge_command(
    directory: Annotated[Path, typer.Argument(help="Directory of an earlier run.")],
    policy: Annotated[str, typer.Option(help="strict, default, exploratory, or a TOML file.")] = "default",
    by_layer: Annotated[bool, typer.Option("--by-layer", help="One column a path and layer.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print verdicts as JSON.")] = False,
) -> None:
    """Judge an earlier run again, under any policy, without running anything."""
    from . import session

    try:
        outcome = session.judge_directory(directory, policy)
    except ValueError as error:
        stop(USAGE, str(error))
    _show(outcome, by_layer, as_json)


def _show(outcome: Any, by_layer: bool, as_json: bool) -> NoReturn:
    from .report import terminal

    if as_json:
        sys.stdout.write(json.dumps(outcome.to_json(), indent=2) + "\n")
    else:
        terminal.show(outcome, console, by_layer)
    raise typer.Exit(outcome.exit_code)


@app.command("list")
def list_command(
    what: Annotated[What, typer.Argument(help="cases, paths or stages.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """List cases, paths (and whether each can run here) or stages."""
    from .report import listing

    rows = {What.cases: listing.cases, What.paths: listing.paths, What.stages: listing.stages}[what]()
    if as_json:
        sys.stdout.write(json.dumps(rows, indent=2) + "\n")
    else:
        listing.show(rows, console)


@app.command("diff")
def diff_command(
    first: Annotated[Path, typer.Argument(help="Directory of the first run.")],
    second: Annotated[Path, typer.Argument(help="Directory of the second run.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """Tell in words how two runs differ: environment, verdicts, selections."""
    from . import rundiff

    try:
        difference = rundiff.compare(first, second)
    except ValueError as error:
        stop(USAGE, str(error))
    if as_json:
        sys.stdout.write(json.dumps(difference.to_json(), indent=2) + "\n")
    else:
        for line in difference.sentences():
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(DISAGREES if difference.matters else AGREES)


@app.command("doctor")
def doctor_command(as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False) -> None:
    """Say what is here, what is missing, and what to install."""
    from dataclasses import asdict

    from .doctor import checks
    from .report import listing

    found = checks()
    if as_json:
        sys.stdout.write(json.dumps([asdict(check) for check in found], indent=2) + "\n")
    else:
        mark = {True: "ok", False: "FAIL", None: "-"}
        listing.show(
            [{"check": c.what, "": mark[c.ok], "found": c.found, "to change that": c.do} for c in found], console
        )
    raise typer.Exit(HARNESS_ERROR if any(check.ok is False for check in found) else AGREES)


@app.command("record")
def record_command(
    case: Annotated[list[str] | None, typer.Option(help="Case to record (repeatable); the fixed list if none.")] = None,
    path: Annotated[str, typer.Option(help="Live path to record.")] = "sglang-fp8",
    out: Annotated[Path, typer.Option(help="Folder of the recordings.")] = Path("recorded"),
) -> None:
    """Record a live path's traces on a GPU, for machines that have none."""
    from . import session
    from .cases.recorded_cases import RECORDED_CASES
    from .recording import record

    device = choose_device(Device.cuda)
    try:
        cases = [session.find_case(name) for name in case] if case else list(RECORDED_CASES)
        session.check_path(path)
    except ValueError as error:
        stop(USAGE, str(error))
    try:
        record(cases, out, path, device, lambda file: console.print(f"written: {file}", markup=False, highlight=False))
    except ValueError as error:
        stop(CANNOT_JUDGE, str(error))


@app.command("reports")
def reports_command(
    report: Annotated[list[str] | None, typer.Argument(help="Ids of field reports; all if none.")] = None,
    path: Annotated[list[str] | None, typer.Option(help="Path to check (repeatable).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """Check paths against the contracts made of public bug reports."""
    from .report import listing
    from .reports import check_reports

    try:
        rows = check_reports(report or [], path or ["sglang-fp8-model", "bf16-k"])
    except ValueError as error:
        stop(USAGE, str(error))
    if as_json:
        sys.stdout.write(json.dumps(rows, indent=2) + "\n")
    else:
        listing.show(rows, console)
    raise typer.Exit(DISAGREES if any(row["answer"] == "broken" for row in rows) else AGREES)


@app.command("ledger")
def ledger_command(as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False) -> None:
    """Measure the known differences of transformers' DeepSeek-V4 again: each must still be there, and no other."""
    from .ledger import rows
    from .paths.base import get_path
    from .report import listing

    available = get_path("transformers").availability()
    if not available.ok:
        stop(CANNOT_JUDGE, f"the ledger needs transformers: {available.why}; {available.install}")
    found = rows()
    if as_json:
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
    else:
        listing.show(found, console)
    raise typer.Exit(DISAGREES if any(row["state"] != "as known" for row in found) else AGREES)


app.add_typer(baseline_app, name="baseline")
app.add_typer(capture_app, name="capture")
app.add_typer(mutants_app, name="mutants")
app.add_typer(recall_app, name="recall")
for command in (
    bench_command,
    bisect_command,
    blame_command,
    census_command,
    cluster_command,
    merge_command,
    replay_command,
    report_command,
    shrink_command,
    soak_command,
    weights_command,
    robust_command,
):
    app.command(command.__name__.removesuffix("_command"))(command)


def main() -> None:
    """Entry point: maps faults of the harness itself to exit code 128 and a broken pipe to silence."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(AGREES)
    except Exception as error:
        if os.environ.get("DIFFTEST_DEBUG"):
            raise
        errors.print(
            f"difftest: internal error: {type(error).__name__}: {error}\n"
            "Note: set DIFFTEST_DEBUG=1 to see the traceback; finished records are kept.",
            markup=False,
            highlight=False,
        )
        sys.exit(HARNESS_ERROR)
