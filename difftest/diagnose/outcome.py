"""What a search ends in: the first bad commit or version, how sure that is, and every verdict on the way."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Self

from .git import Commit
from .judge import Judgement

SCHEMA = "difftest.bisect-report/1"
CONFIRMED, UNCONFIRMED = 0, 125


@dataclass(frozen=True)
class Step:
    """One verdict: of what, why it was asked for, and the answer. `sha` is a version where versions are searched."""

    subject: str
    purpose: str
    sha: str
    title: str
    answer: str
    words: str
    stage: str
    seconds: float

    @classmethod
    def of(cls, judged: Judgement, purpose: str, sha: str, title: str) -> Self:
        return cls(judged.subject, purpose, sha, title, judged.answer, judged.words(), judged.stage, judged.seconds)


@dataclass(frozen=True)
class Confirmation:
    """A check of the result. `answer` is good, bad, skip, or not run; `why` says why it is not a plain answer.

    decisive: the result stands only if it answers as expected. A revert is not: later commits may fail for reasons of
    their own.
    """

    what: str
    sha: str
    expected: str
    answer: str
    why: str = ""
    decisive: bool = True

    @property
    def contradicts(self) -> bool:
        return self.answer in ("good", "bad") and self.answer != self.expected


@dataclass
class Outcome:
    """Produced by the searches, consumed by the reports.

    culprit     the first bad commit (`kind` commit); or `version` is the first bad version, `before` the last good one.
    candidates  commits or versions that skipped ones leave possible, where there is no single one.
    commits     how many commits or versions lay between the endpoints; `unchanged` of them inherited their verdict.
    """

    kind: Literal["commit", "version"]
    good: str
    bad: str
    culprit: Commit | None = None
    version: str = ""
    before: str = ""
    stage: str = ""
    candidates: list[Commit] = field(default_factory=list)
    possible: list[str] = field(default_factory=list)
    confirmations: list[Confirmation] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    commits: int = 0
    unchanged: int = 0
    test: str = ""

    @property
    def verdicts(self) -> int:
        """Distinct commits or versions judged by the search itself: not the endpoints, not the confirmations."""
        return len({step.subject for step in self.steps if step.purpose == "search"})

    @property
    def found(self) -> bool:
        return self.culprit is not None or bool(self.version)

    @property
    def confirmed(self) -> bool:
        """The culprit failed again and all that comes right before it passed again."""
        decisive = [check for check in self.confirmations if check.decisive]
        return self.found and bool(decisive) and all(check.answer == check.expected for check in decisive)

    @property
    def exit_code(self) -> int:
        """0: one first bad commit or version, confirmed. 125: several are possible, or the confirmation failed."""
        return CONFIRMED if self.confirmed else UNCONFIRMED

    def sentence(self) -> str:
        """The conclusion in one line."""
        stage = f", which fails at {self.stage}" if self.stage else ""
        doubt = "" if self.confirmed else " (not confirmed)"
        if self.culprit:
            by = f"by {self.culprit.author}, {self.culprit.date}"
            return f"first bad commit: {self.culprit.sha[:12]} {self.culprit.subject!r} {by}{stage}{doubt}"
        if self.version:
            return f"first bad version: {self.version} (last good: {self.before}){stage}{doubt}"
        several = len(self.candidates) + len(self.possible)
        return f"the first bad {self.kind} is one of {several}: those between could not be judged"

    def to_json(self) -> dict[str, Any]:
        made = {"schema": SCHEMA, "sentence": self.sentence(), "exit_code": self.exit_code, "verdicts": self.verdicts}
        return {**made, "confirmed": self.confirmed, **asdict(self)}
