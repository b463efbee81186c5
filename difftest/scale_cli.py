"""`difftest merge` and `difftest cluster`: results of several machines, and cases on a cluster."""

from pathlib import Path
from typing import Annotated, NoReturn

import typer

USAGE, CANNOT_JUDGE = 2, 125
Policy = Annotated[str, typer.Option(help="strict, default, exploratory, or a TOML file.")]


def merge_command(
    runs: Annotated[list[Path], typer.Argument(help="Run directories of the shards.")],
    out: Annotated[Path, typer.Option(help="New directory for the joined run.")],
    policy: Policy = "default",
) -> None:
    """Join the results of shards into one run and judge it; notice shards that are missing or doubled.

    Exit codes: 0 agrees; 1 something disagrees; 125 a shard is missing or doubled, or cannot judge; 2 usage.
    """
    from .scale.merge import merge
    from .verdict import overall

    try:
        merged = merge(runs, out, policy)
    except (ValueError, FileExistsError) as error:
        _stop(USAGE, "merge", str(error))
    for summary in overall(merged.verdicts):
        counts = ", ".join(f"{count} {answer}" for answer, count in summary.counts.items())
        typer.echo(f"{summary.path:<20} {counts}")
    for problem in merged.problems:
        typer.echo(f"problem: {problem}")
    typer.echo(f"{len(merged.records)} records: {out}")
    raise typer.Exit(merged.exit_code)


def cluster_command(
    out: Annotated[Path, typer.Option(help="New directory for run.json and records.jsonl.")],
    profile: Annotated[str, typer.Option(help="smoke, default, full or gpu: which cases run.")] = "full",
    case: Annotated[list[str] | None, typer.Option(help="Run only this case (repeatable).")] = None,
    path: Annotated[list[str] | None, typer.Option(help="Run only this path (repeatable).")] = None,
    layer: Annotated[list[int] | None, typer.Option(help="Run only this layer (repeatable).")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda: where paths run.")] = "cuda",
    policy: Policy = "default",
    seed: Annotated[int, typer.Option(help="Added to every case's seed.")] = 0,
    address: Annotated[str, typer.Option(help="Ray cluster: auto, local, or host:port.")] = "auto",
    retries: Annotated[int, typer.Option(help="Tries more for a case whose worker died.")] = 3,
) -> None:
    """Run cases on a Ray cluster, one task a case and layer; none is lost when a worker dies.

    Exit codes: 0 agrees; 1 something disagrees; 125 cannot judge; 2 usage.
    """
    from . import session
    from .scale.cluster import NoRay, run_on_cluster

    if device not in ("cpu", "cuda"):
        _stop(USAGE, "cluster", f"--device {device!r} is neither cpu nor cuda")
    try:
        request = session.Request(profile, case or [], path or [], layer or [], device, policy, "none", seed)
        plan, chosen = session.plan(request)
        outcome = run_on_cluster(plan, chosen, out, address, retries, typer.echo)
    except (ValueError, FileExistsError) as error:
        _stop(USAGE, "cluster", str(error))
    except NoRay as error:
        _stop(CANNOT_JUDGE, "cluster", str(error))
    for verdict in outcome.verdicts:
        if verdict.exit_code:
            typer.echo(str(verdict))
    typer.echo(f"{len(outcome.verdicts)} verdicts of {len(outcome.records)} records: {out}")
    raise typer.Exit(outcome.exit_code)


def _stop(code: int, command: str, message: str) -> NoReturn:
    typer.echo(f"difftest {command}: {message}", err=True)
    raise typer.Exit(code)
