"""Judges one subject (a commit, a version, a reverted tree) by as many trials as it takes."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .ledger import Ledger
from .sequential import SequentialTest
from .trial import Aborted, Answer, Command, Place, Trial

FRESH = 1_000_000
"""First seed of a confirmation under a sequential test: other data than the search saw."""

LABEL = 56
"""Columns of a progress line before its numbers."""


class BuildFailed(Exception):
    """A subject could not be built or installed; it is skipped. The message is the last line of the build."""


@dataclass(frozen=True)
class Judgement:
    """The answer for a subject, from how many failing and passing trials, and what the failing ones said."""

    subject: str
    answer: Answer
    failures: int
    passes: int
    seconds: float
    stage: str = ""
    why: str = ""

    def words(self) -> str:
        """`bad at score`, `good (0 of 11 failed)`, `skip: build failed: ...`"""
        runs = self.failures + self.passes
        text: str = self.answer + (f" at {self.stage}" if self.stage else "")
        text += f" ({self.failures} of {runs} failed)" if runs > 1 else ""
        return text + (f": {self.why}" if self.why else "")


class Judge:
    """Asks the verdict command about subjects and keeps every trial in the ledger, from which it answers again at once.

    With a sequential test, trials are repeated with seeds 0, 1, 2 ... until it decides; without, one trial decides.
    """

    def __init__(
        self, command: Command, ledger: Ledger, test: SequentialTest | None, say: Callable[[str], None]
    ) -> None:
        self.command, self.ledger, self.test, self.say = command, ledger, test, say
        self.runs = 0

    def judge(self, subject: str, prepare: Callable[[], Place], label: str, first_seed: int = 0) -> Judgement:
        """The judgement of `subject`; `prepare` checks it out and builds it, called only if a trial has to run."""
        while (judgement := self._weigh(subject)) is None:
            self.run(subject, prepare, first_seed)
        self.say(f"{label:{LABEL}.{LABEL}}  {judgement.seconds:7.1f} s  {judgement.words()}")
        return judgement

    def run(self, subject: str, prepare: Callable[[], Place], first_seed: int = 0) -> Trial:
        """Runs and keeps one more trial of `subject`. Aborted if the command asks for it."""
        seed = first_seed + len(self.ledger.trials.get(subject, []))
        try:
            place = prepare()
            trial = self.command.run(place, seed, self._logs(subject, str(seed)))
        except BuildFailed as error:
            trial = Trial("skip", 125, seed, 0.0, "", f"build failed: {error}")
        if trial.answer == "abort":
            raise Aborted(
                f"the verdict command stopped the search at {subject[:12]}: {trial.why}; "
                f"its output is in {trial.log}.err"
            )
        self.runs += 1
        self.ledger.add(subject, trial)
        return trial

    def disagrees(self, subject: str) -> bool:
        """Whether trials of `subject` came out both ways."""
        return {"good", "bad"} <= {trial.answer for trial in self.ledger.trials.get(subject, [])}

    def rate(self, subject: str) -> str:
        """`failed 3 of 8 times`"""
        answers = [trial.answer for trial in self.ledger.trials.get(subject, [])]
        return f"failed {answers.count('bad')} of {answers.count('bad') + answers.count('good')} times"

    def _logs(self, subject: str, seed: str) -> Path:
        return self.ledger.folder / "logs" / f"{subject.replace(':', '-')}-{seed}"

    def _weigh(self, subject: str) -> Judgement | None:
        trials = self.ledger.trials.get(subject, [])
        if not trials:
            return None
        failures = [trial for trial in trials if trial.answer == "bad"]
        passes = sum(trial.answer == "good" for trial in trials)
        skips = [trial for trial in trials if trial.answer == "skip"]
        seconds = sum(trial.seconds for trial in trials)
        made: dict[str, Any] = {"failures": len(failures), "passes": passes, "seconds": seconds}
        stages = Counter(trial.stage for trial in failures if trial.stage)
        stage = stages.most_common(1)[0][0] if stages else ""
        if trials[0].answer == "skip":
            return Judgement(subject, "skip", why=trials[0].why, **made)
        if self.test is None:
            return Judgement(subject, trials[0].answer, stage=stage if trials[0].answer == "bad" else "", **made)
        decision = self.test.decide(len(failures), passes)
        if decision == "undecided" or len(skips) >= self.test.limit:
            rates = f"between the rates {self.test.good_rate:g} and {self.test.bad_rate:g}"
            return Judgement(subject, "skip", why=f"still open after {len(trials)} trials: fails {rates}", **made)
        if decision == "more":
            return None
        return Judgement(subject, decision, stage=stage if decision == "bad" else "", **made)
