"""The `difftest bisect` command: builds a plan from its options, runs the search, prints and keeps the report."""

import re
import shlex
import signal
import time
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from . import bisect_report
from .bisect import bisect_commits, check_repository
from .bundle import load as load_bundle
from .ledger import Ledger
from .outcome import Outcome
from .plans import CommitPlan, VersionPlan, plan_from_json, plan_to_json
from .sequential import SequentialTest
from .trial import ABORT, SKIP, USAGE, Aborted, CannotJudge, Command, Refused
from .versions import bisect_versions

INTERRUPTED = 130
RUNS = Path("runs")
FILL_IN = re.compile(r"(\{(?:seed|commit|version|package|tree|python|out)\})")
HARNESS = "{python} -P -m difftest"

console = Console()
errors = Console(stderr=True)


class RepeatChoice(StrEnum):
    auto = "auto"
    always = "always"
    never = "never"


def bisect_command(
    command: Annotated[
        list[str] | None,
        typer.Argument(
            help="Verdict command: exit 0 good, 125 skip, 128 up abort, else bad; fill-ins: {seed} {tree} {python}."
        ),
    ] = None,
    repo: Annotated[Path, typer.Option(help="Git repository to search.")] = Path("."),
    good: Annotated[
        str, typer.Option(help="A commit or version that passes; left out: looked for, back from --bad.")
    ] = "",
    bad: Annotated[str, typer.Option(help="A commit (or version) that fails.")] = "HEAD",
    case: Annotated[str, typer.Option(help="Judge by `difftest run` on this case.")] = "",
    path: Annotated[str, typer.Option(help="Path that the case or bundle runs under.")] = "",
    layer: Annotated[int | None, typer.Option(help="Layer that the case runs on.")] = None,
    bundle: Annotated[Path | None, typer.Option(help="Judge by `difftest replay` of this bundle.")] = None,
    stage: Annotated[
        str, typer.Option(help="Only a failure at this stage (a bundle's own) is bad; others are skipped.")
    ] = "",
    build: Annotated[
        str,
        typer.Option(help="Shell command after every checkout ('pip install -e .'); a failure skips the commit."),
    ] = "",
    venv: Annotated[
        bool, typer.Option("--venv", help="Build into a throw-away virtual environment laid over this one.")
    ] = False,
    clean: Annotated[
        bool, typer.Option("--clean", help="Remove ignored and untracked files before every build.")
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(help="File or folder with the fault (repeatable): commits not changing it are not run."),
    ] = None,
    package: Annotated[str, typer.Option(help="Search the released versions of this package instead of commits.")] = "",
    extra: Annotated[
        list[str] | None,
        typer.Option("--with", help="Further requirement in every version's environment (repeatable)."),
    ] = None,
    isolated: Annotated[
        bool, typer.Option("--isolated", help="Versions do not see the packages of this environment.")
    ] = False,
    find_links: Annotated[
        list[str] | None, typer.Option(help="Directory or page of wheels, for pip (repeatable).")
    ] = None,
    index_url: Annotated[str, typer.Option(help="Package index, for pip.")] = "",
    no_index: Annotated[bool, typer.Option("--no-index", help="Use --find-links alone.")] = False,
    pre: Annotated[bool, typer.Option("--pre", help="Include pre-releases.")] = False,
    repeat: Annotated[
        RepeatChoice,
        typer.Option(help="Repeat seeds by a sequential test: auto (after a flaky verdict), always, never."),
    ] = RepeatChoice.auto,
    good_rate: Annotated[
        float, typer.Option(help="A good commit fails at most this often.")
    ] = SequentialTest.good_rate,
    bad_rate: Annotated[float, typer.Option(help="A bad commit fails at least this often.")] = SequentialTest.bad_rate,
    alpha: Annotated[float, typer.Option(help="Probability of calling a good commit bad.")] = SequentialTest.alpha,
    beta: Annotated[float, typer.Option(help="Probability of calling a bad commit good.")] = SequentialTest.beta,
    trials: Annotated[
        int, typer.Option(help="Trials of one commit at most; an open question skips it.")
    ] = SequentialTest.limit,
    timeout: Annotated[float, typer.Option(help="Seconds for one verdict, 0 without limit; over it is a skip.")] = 0.0,
    build_timeout: Annotated[
        float, typer.Option(help="Seconds for one build, 0 without limit; over it is a skip.")
    ] = 0.0,
    ignore_local_changes: Annotated[
        bool, typer.Option("--ignore-local-changes", help="Judge commits although the checkout has changes.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Directory for the state, logs and report.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with an interrupted search in this directory.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON; progress goes to stderr.")] = False,
) -> None:
    """Find the first bad commit of any git repository, or the first bad released version of a package.

    Commits are checked out in a worktree of their own; your checkout is not touched.

    A crash (exit 128 or more) stops the search; if it is the fault, write 'COMMAND || exit 1'.

    Submodules need --build 'git submodule update --init --recursive && ...'.

    {commit} or {version}, and {out} (a directory it may create) are filled in, too.

    Exit codes: 0 found and confirmed, 125 no single or confirmed answer, 128 aborted, 2 usage.
    """
    try:
        if resume:
            ledger = Ledger.open(resume)
            plan = plan_from_json(ledger.plan)
        else:
            line = _verdict(command or [], case, path, layer, bundle)
            judged_by = Command(line, bool(case or bundle), timeout, stage or _stage_of(bundle))
            test = SequentialTest(good_rate, bad_rate, alpha, beta, trials)
            if package:
                _refuse_for_versions(build, only, good, bad)
                sources = _sources(find_links or [], index_url, no_index, pre)
                requirements, again = tuple(extra or []), repeat == "always"
                plan = VersionPlan(package, good, bad, judged_by, not isolated, requirements, sources, test, again)
            else:
                files, local = tuple(only or []), ignore_local_changes
                at = repo.resolve()
                plan = CommitPlan(
                    at, judged_by, good, bad, build, build_timeout, files, repeat.value, test, venv, clean, local
                )
                check_repository(plan)
            ledger = Ledger.create(out or RUNS / time.strftime("bisect-%Y%m%d-%H%M%S"), plan_to_json(plan))
        outcome = _search(plan, ledger, errors if as_json else console)
    except ValueError as error:
        _stop(SKIP if isinstance(error, CannotJudge) else USAGE, str(error))
    except Aborted as error:
        _stop(ABORT, str(error))
    _report(outcome, ledger.folder, as_json)


def _verdict(command: list[str], case: str, path: str, layer: int | None, bundle: Path | None) -> str:
    """The verdict command as one shell line. Refused unless exactly one of command, case and bundle is given."""
    if sum(map(bool, (command, case, bundle))) != 1:
        raise Refused("say how a commit is judged by exactly one of: a command after `--`, --case, or --bundle")
    if command:
        return command[0] if len(command) == 1 else " ".join(map(_quoted, command))
    if case:
        at = "" if layer is None else f" --layer {layer}"
        under = f" --path {shlex.quote(path)}" if path else ""
        return f"{HARNESS} run --case {shlex.quote(case)}{under}{at} --seed {{seed}} --out {{out}} --keep none --json"
    if bundle is None or not bundle.exists():
        raise Refused(f"--bundle {bundle} does not exist; give what `difftest shrink` wrote")
    under = f" --path {shlex.quote(path)}" if path else ""
    return f"{HARNESS} replay {shlex.quote(str(bundle.resolve()))}{under} --json"


def _stage_of(bundle: Path | None) -> str:
    """The stage at which a bundle fails: a commit that fails elsewhere says nothing about it. ValueError if broken."""
    return load_bundle(bundle).signature.stage if bundle else ""


def _quoted(word: str) -> str:
    """`word` for the shell; the fill-ins in it, which are quoted when they are filled in, stay as they are."""
    parts = FILL_IN.split(word)
    return "".join(part if FILL_IN.fullmatch(part) else shlex.quote(part) for part in parts if part) or "''"


def _sources(find_links: list[str], index_url: str, no_index: bool, pre: bool) -> tuple[str, ...]:
    links = [
        part
        for link in find_links
        for part in ("--find-links", str(Path(link).resolve()) if Path(link).exists() else link)
    ]
    index = ["--index-url", index_url] if index_url else []
    return (*links, *index, *(["--no-index"] if no_index else []), *(["--pre"] if pre else []))


def _refuse_for_versions(build: str, only: list[str] | None, good: str, bad: str) -> None:
    if build or only:
        raise Refused("--build and --only are about commits; with --package every version is installed by pip")
    if not good or bad == "HEAD":
        raise Refused("--package needs two released versions, such as --good 0.5.13 --bad 0.5.23")


def _search(plan: CommitPlan | VersionPlan, ledger: Ledger, to: Console) -> Outcome:
    def say(line: str) -> None:
        to.print(line, markup=False, highlight=False, soft_wrap=True)

    def ended(number: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, ended)
    try:
        if isinstance(plan, VersionPlan):
            return bisect_versions(plan, ledger, say)
        return bisect_commits(plan, ledger, say)
    except KeyboardInterrupt:
        kept = sum(map(len, ledger.trials.values()))
        _stop(
            INTERRUPTED,
            f"interrupted with {kept} trials kept; the repository is as it was; go on with "
            f"`difftest bisect --resume {shlex.quote(str(ledger.folder))}`",
        )
    finally:
        signal.signal(signal.SIGTERM, before)


def _report(outcome: Outcome, folder: Path, as_json: bool) -> NoReturn:
    bisect_report.save(outcome, folder)
    if as_json:
        typer.echo((folder / bisect_report.JSON).read_text(), nl=False)
    else:
        bisect_report.show(outcome, console)
        console.print(f"report: {folder / bisect_report.MARKDOWN}", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(outcome.exit_code)


def _stop(code: int, message: str) -> NoReturn:
    errors.print(f"difftest bisect: {message}", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(code)
