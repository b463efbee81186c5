"""First bad released version of a package, each version in a throw-away virtual environment."""

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path

from .environments import make_venv, pip_command, plain_environment, venv_environment
from .judge import FRESH, BuildFailed, Judge, Judgement
from .ledger import Ledger
from .outcome import Confirmation, Outcome, Step
from .plans import VersionPlan
from .trial import CannotJudge, Place, Refused, first_error, run_shell

SHOWN = 5


def released_versions(package: str, sources: tuple[str, ...] = ()) -> list[str]:
    """Versions of `package` that pip can install here, oldest first. CannotJudge in pip's words if it offers none."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "index", "versions", package, *sources]
    done = subprocess.run(command, capture_output=True, text=True, env=plain_environment(), stdin=subprocess.DEVNULL)
    found = re.search(r"^Available versions: (.*)$", done.stdout, re.MULTILINE)
    if done.returncode or not found:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise CannotJudge(f"pip offers no version of {package}: {(said or ['no reason given'])[-1].strip()}")
    return [version.strip() for version in found[1].split(",")][::-1]


def between(plan: VersionPlan, offered: list[str]) -> list[str]:
    """Versions from `good` to `bad`, both included. Refused for an unknown version, or endpoints swapped."""
    for option, version in (("--good", plan.good), ("--bad", plan.bad)):
        if version not in offered:
            close = get_close_matches(version, offered, n=SHOWN, cutoff=0.6) or offered[-SHOWN:]
            raise Refused(
                f"{option} {version} is no version of {plan.package} that pip offers; "
                f"the nearest are {', '.join(close)}"
            )
    first, last = offered.index(plan.good), offered.index(plan.bad)
    if first == last:
        raise Refused(f"--good and --bad are both {plan.good}; give two versions")
    if first > last:
        raise Refused(
            f"--good {plan.good} is newer than --bad {plan.bad}: they look swapped; give the older one as --good"
        )
    return offered[first : last + 1]


def bisect_versions(plan: VersionPlan, ledger: Ledger, say: Callable[[str], None] = lambda _: None) -> Outcome:
    """Finds the first bad released version and confirms it and the one before it in fresh environments.

    Raises Refused, CannotJudge or Aborted, each with one sentence; KeyboardInterrupt passes through.
    """
    with ledger.lock():
        if "versions" not in ledger.facts:
            ledger.note(versions=between(plan, released_versions(plan.package, plan.sources)))
        search = _Search(plan, ledger, say)
        try:
            return search.run(ledger.facts["versions"])
        finally:
            search.discard()


class _Search:
    """Bisects a list of versions; verdicts already in the ledger are not asked for again."""

    def __init__(self, plan: VersionPlan, ledger: Ledger, say: Callable[[str], None]) -> None:
        self.plan, self.ledger = plan, ledger
        self.judge = Judge(plan.command, ledger, plan.test if plan.repeat else None, say)
        self.current = ""
        self.steps: list[Step] = []

    def run(self, versions: list[str]) -> Outcome:
        outcome = Outcome("version", versions[0], versions[-1], steps=self.steps, commits=len(versions) - 1)
        self._endpoint(versions[-1], "bad", "--bad")
        self._endpoint(versions[0], "good", "--good")
        low, high = self._narrow(versions)
        outcome.test = self.plan.test.sentence(len({step.subject for step in self.steps})) if self.judge.test else ""
        if high - low > 1:
            outcome.possible = versions[low + 1 : high + 1]
            outcome.notes.append("versions in between could not be judged; see why in the list of verdicts")
            return outcome
        outcome.before, outcome.version = versions[low], versions[high]
        for version, expected, what in (
            (versions[high], "bad", "the version itself"),
            (versions[low], "good", "the version before it"),
        ):
            self.discard()
            judged = self._judge(version, "confirmation", f"{version}:again", FRESH if self.judge.test else 0)
            outcome.stage = judged.stage if expected == "bad" else outcome.stage
            outcome.confirmations.append(Confirmation(what, version, expected, judged.answer, judged.why))
        if any(check.contradicts for check in outcome.confirmations):
            outcome.notes.append(
                "the verdict came out the other way the second time: it is flaky; repeat seeds with --repeat always"
            )
        return outcome

    def _endpoint(self, version: str, expected: str, option: str) -> None:
        judged = self._judge(version, f"{expected} endpoint")
        if judged.answer == "skip":
            raise CannotJudge(f"{option} {version} cannot be judged ({judged.why}); name another version")
        if judged.answer != expected:
            fails = "passes" if judged.answer == "good" else "fails"
            raise CannotJudge(
                f"{option} {version} {fails}; name a version that {'fails' if expected == 'bad' else 'passes'}"
            )

    def _narrow(self, versions: list[str]) -> tuple[int, int]:
        """Indices of the last version known good and the first known bad; those between them were all skipped."""
        low, high = 0, len(versions) - 1
        skipped: set[int] = set()
        while open_ones := [index for index in range(low + 1, high) if index not in skipped]:
            middle = min(open_ones, key=lambda index: abs(2 * index - low - high))
            answer = self._judge(versions[middle], "search").answer
            if answer == "good":
                low = middle
            elif answer == "bad":
                high = middle
            else:
                skipped.add(middle)
        return low, high

    def _judge(self, version: str, purpose: str, subject: str = "", first_seed: int = 0) -> Judgement:
        label = f"{purpose:14} {self.plan.package} {version}"
        judged = self.judge.judge(subject or version, lambda: self._place(version), label, first_seed)
        self.steps.append(Step.of(judged, purpose, version, ""))
        return judged

    def _folder(self, version: str) -> Path:
        return self.ledger.folder.resolve() / "venvs" / version

    def discard(self) -> None:
        """Removes the environment of the last verdict."""
        if self.current and not self.plan.keep:
            shutil.rmtree(self._folder(self.current), ignore_errors=True)
        self.current = ""

    def _place(self, version: str) -> Place:
        """A virtual environment with `version` installed. BuildFailed if pip cannot."""
        folder = self._folder(version)
        words = {"version": version, "package": self.plan.package, "python": str(folder / "bin" / "python")}
        place = Place(Path.cwd(), venv_environment(folder), words)
        if self.current != version:
            self.discard()
            self.current = version
            python = make_venv(folder, self.plan.overlay)
            logs = self.ledger.folder / "logs" / f"{version}-install"
            asked = [
                *pip_command(python),
                "install",
                *self.plan.sources,
                f"{self.plan.package}=={version}",
                *self.plan.extra,
            ]
            line = " ".join(shlex.quote(part) for part in asked)
            base = Place(Path.cwd(), plain_environment())
            if run_shell(line, base, {}, logs) != 0:
                self.discard()
                raise BuildFailed(first_error(logs) or "pip failed")
        return place
