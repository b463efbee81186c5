"""First bad commit of a git repository for any verdict command.

`git bisect` chooses the commits, in a worktree of its own: the user's checkout, index, branches and stash stay as they
are.
"""

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from .environments import make_venv, plain_environment, venv_environment
from .git import Commit, Repository
from .judge import FRESH, BuildFailed, Judge, Judgement
from .ledger import Ledger
from .outcome import Confirmation, Outcome, Step
from .plans import CommitPlan
from .trial import CannotJudge, Place, Refused, first_error, run_shell

FOUND = re.compile(r"^# first bad commit: \[(\w+)\]", re.MULTILINE)
POSSIBLE = re.compile(r"^# possible first bad commit: \[(\w+)\]", re.MULTILINE)
SHOWN_FILES = 3
SURPRISE = 3
"""Trials that an endpoint gets on top when it comes out the other way, to see whether the verdict is flaky."""


class Flaky(Exception):
    """Trials of one subject came out both ways while one trial was to decide."""


def check_repository(plan: CommitPlan) -> Repository:
    """The plan's repository. Refused if it has local changes, which no commit holds and a search would not see."""
    repository = Repository.open(plan.repository)
    changed = repository.local_changes()
    if changed and not plan.ignore_local_changes:
        shown = ", ".join(changed[:SHOWN_FILES]) + (", ..." if len(changed) > SHOWN_FILES else "")
        raise Refused(
            f"{repository.root} has local changes ({shown}), which no commit holds and the search would not see; put "
            f"them away with `git -C {repository.root} stash push`, later back with `stash pop`, or pass "
            "--ignore-local-changes to judge the commits alone (the checkout is not touched either way)"
        )
    return repository


def bisect_commits(plan: CommitPlan, ledger: Ledger, say: Callable[[str], None] = lambda _: None) -> Outcome:
    """Finds the first bad commit and confirms it by the commit before it and by reverting it.

    Raises Refused (bad input), CannotJudge (no answer here) or Aborted (the verdict command said stop), each with one
    sentence; KeyboardInterrupt passes through. In every case the worktrees are gone and the ledger holds all trials.
    """
    repository = check_repository(plan)
    with ledger.lock(), _worktrees(repository, ledger.folder.resolve()):
        search = _Search(plan, repository, ledger, say)
        try:
            return search.run()
        except Flaky as error:
            if plan.repeat == "never":
                raise CannotJudge(f"{error}; the verdict is flaky: leave --repeat never out to repeat seeds") from error
            say(f"{error}: from here on seeds are repeated until a sequential test decides")
            ledger.note(flaky=str(error))
            return _Search(plan, repository, ledger, say).run()


@contextmanager
def _worktrees(repository: Repository, folder: Path) -> Iterator[None]:
    try:
        yield
    finally:
        for name in ("tree", "revert"):
            repository.remove_worktree(folder / name)


class _Search:
    """One pass over the history; all it learns is in the ledger, so a second pass starts where the first ended."""

    def __init__(self, plan: CommitPlan, repository: Repository, ledger: Ledger, say: Callable[[str], None]) -> None:
        self.plan, self.repository, self.ledger, self.say = plan, repository, ledger, say
        repeated = plan.repeat == "always" or "flaky" in ledger.facts
        self.judge = Judge(plan.command, ledger, plan.test if repeated else None, say)
        self.tree = ledger.folder.resolve() / "tree"
        self.current = ""
        self.steps: list[Step] = []
        self.python = Path(sys.executable)
        self.environment = plain_environment()
        if plan.venv:
            self.python = make_venv(ledger.folder.resolve() / "venv", overlay=True)
            self.environment = venv_environment(ledger.folder.resolve() / "venv")

    def run(self) -> Outcome:
        repository, plan = self.repository, self.plan
        if "bad" not in self.ledger.facts:
            good = repository.resolve(plan.good, "--good") if plan.good else ""
            self.ledger.note(bad=repository.resolve(plan.bad, "--bad"), good=good)
        good, bad = self.ledger.facts["good"], self.ledger.facts["bad"]
        self._check_order(good, bad)
        repository.add_worktree(self.tree, bad)
        self._bad_endpoint(good, bad)
        good, bad = (self._good_endpoint(good, bad), bad) if good else self._find_good(bad)
        start = self._start(good, bad)
        candidates = self._narrow(good, start)
        outcome = Outcome("commit", good, bad, steps=self.steps, commits=repository.count(good, bad))
        outcome.unchanged = outcome.commits - repository.count(good, start, plan.only) if plan.only else 0
        outcome.test = plan.test.sentence(len({step.subject for step in self.steps})) if self.judge.test else ""
        if len(candidates) > 1:
            outcome.candidates = [repository.commit(sha) for sha in candidates]
            outcome.notes.append("commits in between could not be judged; see why in the list of verdicts")
            return outcome
        outcome.culprit = repository.commit(candidates[0])
        self._confirm(outcome, outcome.culprit, bad)
        return outcome

    def _check_order(self, good: str, bad: str) -> None:
        if not good:
            return
        if good == bad:
            raise Refused(f"--good {self.plan.good} and --bad {self.plan.bad} are the same commit {bad[:12]}; give two")
        if self.repository.is_ancestor(bad, good):
            raise Refused(
                f"--bad {self.plan.bad} is an ancestor of --good {self.plan.good}: they look swapped; give the older "
                "one as --good (to find the commit that fixed a fault, also invert the verdict: `! COMMAND`)"
            )
        if not self.repository.ask("merge-base", good, bad):
            raise Refused(f"--good {self.plan.good} and --bad {self.plan.bad} have no common history; give two that do")

    def _bad_endpoint(self, good: str, bad: str) -> None:
        judged = self._judge(bad, "bad endpoint")
        if judged.answer == "skip":
            raise CannotJudge(
                f"--bad {self.plan.bad} cannot be judged ({judged.why}); repair that first, or name another"
            )
        if judged.answer == "bad":
            return
        self._surprised(bad)
        if good and self._judge(good, "good endpoint").answer == "bad":
            raise Refused(
                f"--good {self.plan.good} fails and --bad {self.plan.bad} passes: the fault was fixed in between, not "
                "introduced; to find the commit that fixed it invert the verdict (`! COMMAND`)"
            )
        raise CannotJudge(f"--bad {self.plan.bad} passes, so there is nothing to search; name a commit that fails")

    def _good_endpoint(self, good: str, bad: str) -> str:
        judged = self._judge(good, "good endpoint")
        if judged.answer == "skip":
            raise CannotJudge(
                f"--good {self.plan.good} cannot be judged ({judged.why}); repair that first, or name another"
            )
        if judged.answer == "bad":
            self._surprised(good)
            where = f" at {judged.stage}" if judged.stage else ""
            hint = (
                ""
                if self.plan.build
                else "; if the verdict reads an installed package, give --build to install every commit"
            )
            raise CannotJudge(
                f"--good {self.plan.good} fails{where}, like --bad {self.plan.bad}: the fault is older; name an "
                f"earlier commit, or leave --good out to look for one{hint}"
            )
        return good

    def _find_good(self, bad: str) -> tuple[str, str]:
        """Goes back from `bad` 1, 2, 4 ... first parents to a commit that passes; also the oldest known bad one."""
        line = self.repository.first_parents(bad)
        back, newest_bad, last = 1, bad, len(line) - 1
        while last > 0:
            sha = line[min(back, last)]
            judged = self._judge(sha, f"{min(back, last)} back")
            if judged.answer == "good":
                return sha, newest_bad
            newest_bad = sha if judged.answer == "bad" else newest_bad
            if back >= last:
                break
            back *= 2
        raise CannotJudge(
            f"no good commit was found: the verdict does not pass at any of the commits tried back to the first one "
            f"({line[-1][:12]}); the fault is as old as the history, or the verdict does not fit old commits"
        )

    def _surprised(self, sha: str) -> None:
        """An endpoint came out the other way: run it a few times more, a flaky verdict is the likeliest reason."""
        for _ in range(SURPRISE if self.judge.test is None else 0):
            self.judge.run(sha, lambda: self._place(sha))
            self._check_flaky(sha)

    def _check_flaky(self, subject: str) -> None:
        if self.judge.test is None and self.judge.disagrees(subject):
            raise Flaky(f"{subject[:12]} {self.judge.rate(subject)}")

    def _start(self, good: str, bad: str) -> str:
        """The bad commit to start from: with `only`, the nearest ancestor of `bad` that changed one of the files."""
        only = self.plan.only
        if not only:
            return bad
        start = self.repository.last_change(bad, only)
        if not start:
            raise Refused(
                f"--only {' '.join(only)}: no commit up to {self.plan.bad} changed it; give paths from the root"
            )
        if self.repository.is_ancestor(start, good):
            raise CannotJudge(
                f"no commit after {good[:12]} changes {' '.join(only)}, yet {good[:12]} passes and {bad[:12]} fails: "
                "the fault comes from other files; leave --only out"
            )
        return start

    def _narrow(self, good: str, bad: str) -> list[str]:
        """Drives `git bisect` and returns the first bad commit, or all that skipped commits leave possible."""
        git, at = self.repository, self.tree
        git.run("bisect", "reset", at=at)
        done = git.run("bisect", "start", "--no-checkout", bad, good, "--", *self.plan.only, at=at)
        while True:
            log = git.ask("bisect", "log", at=at)
            if found := FOUND.search(log):
                return [found[1]]
            if possible := POSSIBLE.findall(log):
                return list(dict.fromkeys(possible))
            if done.returncode:
                said = " ".join(done.stderr.split())
                raise CannotJudge(f"git bisect cannot go on between {good[:12]} and {bad[:12]}: {said}")
            sha = git.must("rev-parse", "BISECT_HEAD", at=at)
            judged = self._judge(sha, "search")
            done = git.run("bisect", judged.answer, sha, at=at)

    def _judge(self, sha: str, purpose: str, subject: str = "", first_seed: int = 0) -> Judgement:
        label = f"{purpose:14} {sha[:12]} {self.repository.subject(sha)}"
        judged = self.judge.judge(subject or sha, lambda: self._place(sha), label, first_seed)
        self.steps.append(Step.of(judged, purpose, sha, self.repository.subject(sha)))
        return judged

    def _place(self, sha: str) -> Place:
        """Checks `sha` out in the worktree and builds it, unless it is there already. BuildFailed if that fails."""
        words = {"commit": sha, "python": str(self.python)}
        place = Place(self.tree, self.environment, words)
        if self.current != sha:
            self.current = ""
            self.repository.must("checkout", "--force", "--detach", sha, at=self.tree)
            self._build(place, sha)
            self.current = sha
        return place

    def _build(self, place: Place, name: str) -> None:
        if self.plan.clean:
            self.repository.must("clean", "-ffdx", at=place.tree)
        if not self.plan.build:
            return
        logs = self.ledger.folder / "logs" / f"{name}-build"
        words = {**place.words, "tree": str(place.tree)}
        code = run_shell(self.plan.build, place, words, logs, self.plan.build_timeout)
        if code != 0:
            why = f"took longer than {self.plan.build_timeout:g} s" if code is None else first_error(logs)
            raise BuildFailed(why or f"exit code {code}")

    def _confirm(self, outcome: Outcome, culprit: Commit, bad: str) -> None:
        """Runs the culprit and the commits before it once more, then the bad endpoint with the culprit reverted."""
        outcome.stage = self._again(outcome, culprit.sha, "bad", "the commit itself").stage
        for parent in culprit.parents:
            self._again(outcome, parent, "good", "the commit before it")
        ends = next((step.stage for step in self.steps if step.sha == bad and step.stage), "")
        if ends and outcome.stage and ends != outcome.stage:
            outcome.notes.append(
                f"{bad[:12]} fails at {ends}, the first bad commit at {outcome.stage}: there may be two faults; "
                f"search for one with --stage {ends}"
            )
        self._revert(outcome, culprit, bad)

    def _again(self, outcome: Outcome, sha: str, expected: Literal["good", "bad"], what: str) -> Judgement:
        self.current = ""
        seed = FRESH if self.judge.test else 0
        judged = self._judge(sha, "confirmation", f"{sha}:again", seed)
        if self.judge.test is None and {judged.answer, expected} == {"good", "bad"} and sha in self.ledger.trials:
            raise Flaky(f"{sha[:12]} was {expected} and then {judged.answer}")
        outcome.confirmations.append(Confirmation(what, sha, expected, judged.answer, judged.why))
        return judged

    def _revert(self, outcome: Outcome, culprit: Commit, bad: str) -> None:
        """Reverts the culprit on the bad endpoint, in a worktree of its own, and judges the result."""
        what = f"{bad[:12]} with the commit reverted"

        def note(answer: str, why: str) -> None:
            outcome.confirmations.append(Confirmation(what, "", "good", answer, why, decisive=False))

        if culprit.sha == bad or not culprit.parents:
            why = (
                "it is the bad endpoint: the commit before it says the same" if culprit.parents else "it has no parent"
            )
            note("not run", why)
            return
        folder = self.ledger.folder.resolve() / "revert"
        self.repository.add_worktree(folder, bad)
        mainline = ["--mainline", "1"] if len(culprit.parents) > 1 else []
        done = self.repository.run("revert", "--no-commit", *mainline, culprit.sha, at=folder)
        conflicts = self.repository.ask("diff", "--name-only", "--diff-filter=U", at=folder).split()
        if done.returncode or not self.repository.ask("diff", "--cached", "--name-only", at=folder):
            why = (
                f"does not apply cleanly: conflicts in {', '.join(conflicts)}" if conflicts else "changes nothing there"
            )
            note("not run", why)
            return
        subject = f"{culprit.sha}:reverted"
        judged = self.judge.judge(
            subject,
            lambda: self._reverted_place(folder, subject),
            f"{'revert':14} {what}",
            FRESH if self.judge.test else 0,
        )
        note(judged.answer, judged.why)
        if judged.answer == "bad":
            outcome.notes.append("reverting the commit does not make it pass: something later fails, too")

    def _reverted_place(self, folder: Path, subject: str) -> Place:
        place = Place(folder, self.environment, {"commit": subject, "python": str(self.python)})
        if self.current != subject:
            self._build(place, subject.replace(":", "-"))
            self.current = subject
        return place
