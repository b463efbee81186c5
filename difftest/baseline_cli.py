"""`difftest baseline save|compare|judge|run`: each parses, calls one function and chooses the exit code."""

import json
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from . import baseline_report, baseline_run
from .baseline import Comparison, compare, save
from .baseline_policy import load_baseline_policy
from .baseline_stats import seeds_needed
from .baseline_verdict import CANNOT_JUDGE, judge
from .diagnose.trial import CannotJudge

USAGE = 2
BASE, HEAD, RESULT, SUMMARY = "base", "head", "baseline-result.json", "baseline-result.md"

app = typer.Typer(no_args_is_help=True, help="Compare a head with a base, paired seed by seed.")
Policy = Annotated[str, typer.Option(help="strict, default, exploratory, or a TOML file.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Out = Annotated[Path | None, typer.Option(help="Directory for the result as JSON and markdown.")]


@app.command("save")
def save_command(
    runs: Annotated[Path, typer.Argument(help="Directory of a run, or of several (one a seed).")],
    out: Annotated[Path, typer.Argument(help="Directory of the baseline.")],
    replace: Annotated[bool, typer.Option("--replace", help="Replace the baseline that is there.")] = False,
) -> None:
    """Keep the records of runs as a baseline."""
    try:
        count = save(runs, out, replace)
    except ValueError as error:
        _stop(USAGE, str(error))
    typer.echo(f"{count} records kept in {out}")


@app.command("compare")
def compare_command(
    base: Annotated[Path, typer.Argument(help="Saved baseline, run, or directory of runs of the base.")],
    head: Annotated[Path, typer.Argument(help="The same of the head.")],
    policy: Policy = "default",
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Say what got worse or better outside the noise, in accuracy and latency, and which baselines have no partner."""
    try:
        comparison = compare(base, head)
    except ValueError as error:
        _stop(USAGE, str(error))
    _show(comparison, policy, out, as_json)


@app.command("judge")
def judge_command(
    result: Annotated[Path, typer.Argument(help=f"{RESULT} that `baseline compare` wrote.")],
    policy: Policy = "default",
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Judge an earlier comparison again, under any policy, without running or reading anything else."""
    file = result / RESULT if result.is_dir() else result
    try:
        raw = json.loads(file.read_text())
        comparison = Comparison.from_json(raw["comparison"] if isinstance(raw, dict) and "comparison" in raw else raw)
    except FileNotFoundError:
        _stop(USAGE, f"{file} does not exist; give what `baseline compare --out` wrote")
    except ValueError as error:
        _stop(USAGE, f"{file} cannot be judged: {error}")
    _show(comparison, policy, out, as_json)


@app.command("run")
def run_command(
    base: Annotated[str, typer.Argument(help="Shell command of the base; {seed}, {out} and {python} are filled in.")],
    head: Annotated[str, typer.Argument(help="Shell command of the head.")],
    out: Annotated[Path, typer.Option(help="Directory for the runs of both sides and the result.")],
    seeds: Annotated[int, typer.Option(help="Seeds to run; 0 means as few as the policy's alpha needs.")] = 0,
    policy: Policy = "default",
    as_json: AsJson = False,
) -> None:
    """Run base and head alternately on this machine, one seed at a time, and compare them."""
    try:
        count = seeds or seeds_needed(load_baseline_policy(policy).alpha)
        baseline_run.run(base, head, count, out, lambda line: typer.echo(line, err=True))
        comparison = compare(out / BASE, out / HEAD)
    except CannotJudge as error:
        _stop(CANNOT_JUDGE, str(error))
    except ValueError as error:
        _stop(USAGE, str(error))
    _show(comparison, policy, out, as_json)


def _show(comparison: Comparison, policy: str, out: Path | None, as_json: bool) -> NoReturn:
    try:
        judged = judge(comparison, load_baseline_policy(policy))
    except ValueError as error:
        _stop(USAGE, str(error))
    text = json.dumps(judged.to_json(), indent=2)
    if out:
        out.mkdir(parents=True, exist_ok=True)
        (out / RESULT).write_text(text + "\n")
        (out / SUMMARY).write_text(baseline_report.markdown(judged))
    typer.echo(text if as_json else "\n".join(baseline_report.lines(judged)))
    raise typer.Exit(judged.exit_code)


def _stop(code: int, message: str) -> NoReturn:
    typer.echo(f"difftest baseline: {message}", err=True)
    raise typer.Exit(code)
