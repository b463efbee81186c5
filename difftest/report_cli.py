"""`difftest report`: result directories as HTML, Markdown or JUnit XML."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NoReturn

import typer

USAGE, MISSING = 2, 125


def report_command(
    directories: Annotated[
        list[Path], typer.Argument(help="Result directories: runs, shards, recall, bench, baseline.")
    ],
    html: Annotated[bool, typer.Option("--html", help="One self-contained HTML file.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Markdown for a job summary.")] = False,
    junit: Annotated[bool, typer.Option("--junit", help="JUnit XML with metrics and bounds as properties.")] = False,
    out: Annotated[Path | None, typer.Option(help="File to write; standard output by default.")] = None,
    policy: Annotated[str, typer.Option(help="strict, default, exploratory, or a TOML file.")] = "default",
    base: Annotated[Path | None, typer.Option(help="Runs of the base branch to compare with.")] = None,
    gate: Annotated[bool, typer.Option("--gate", help="Exit as the verdict says: 0, 1 or 125.")] = False,
) -> None:
    """Report what runs found, for people or for a CI system, under any policy and without running anything.

    Exit codes: 0 the report is written (with --gate: and everything agrees); with --gate 1 something disagrees, 125
    cannot judge; 2 usage.
    """
    from .report.evidence import load
    from .report.svg import NoPlots

    chosen = [name for name, asked in (("html", html), ("markdown", markdown), ("junit", junit)) if asked]
    if len(chosen) != 1:
        _stop(USAGE, "choose one of --html, --markdown and --junit")
    try:
        evidence = load(directories, policy)
        if base is not None:
            evidence.baseline = _compare(base, directories)
        text = _writer(chosen[0])(evidence)
        _write(text, out)
    except NoPlots as error:
        _stop(MISSING, str(error))
    except (ValueError, OSError) as error:
        _stop(USAGE, str(error))
    raise typer.Exit(evidence.exit_code if gate else 0)


def _writer(form: str) -> Callable[..., str]:
    """The function that makes this form; the others' dependencies are not imported."""
    if form == "html":
        from .report.html import html

        return html
    if form == "markdown":
        from .report.markdown import markdown

        return markdown
    from .report.junit import junit

    return junit


def _compare(base: Path, heads: list[Path]) -> dict[str, object]:
    from .baseline import compare
    from .baseline_policy import load_baseline_policy
    from .baseline_verdict import judge

    if len(heads) != 1:
        raise ValueError("--base compares with one directory; put the runs of the head into one")
    return judge(compare(base, heads[0]), load_baseline_policy("default")).to_json()


def _write(text: str, out: Path | None) -> None:
    if out is None:
        sys.stdout.write(text)
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(f"{out.name}.part")
    part.write_text(text)
    part.replace(out)


def _stop(code: int, message: str) -> NoReturn:
    typer.echo(f"difftest report: {message}", err=True)
    raise typer.Exit(code)
