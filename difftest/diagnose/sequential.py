"""Wald's sequential probability ratio test: how often to repeat a verdict that does not always come out the same."""

import math
from dataclasses import dataclass
from typing import Literal

Decision = Literal["good", "bad", "more", "undecided"]


@dataclass(frozen=True)
class SequentialTest:
    """Decides between "fails at most at `good_rate`" and "fails at least at `bad_rate`" with as few trials as it can.

    alpha  probability of calling a good commit bad, beta of calling a bad one good (Wald's approximation: the true
           ones are at most alpha / (1 - beta) and beta / (1 - alpha)).
    limit  trials after which an open question is `undecided`: the true rate lies between the two.

    Raises ValueError unless 0 <= good_rate < bad_rate <= 1, both error probabilities lie in (0, 0.5) and limit >= 1.
    Source: A. Wald, Sequential Tests of Statistical Hypotheses, Annals of Mathematical Statistics 16 (1945), section 3.
    """

    good_rate: float = 0.05
    bad_rate: float = 0.5
    alpha: float = 0.001
    beta: float = 0.001
    limit: int = 64

    def __post_init__(self) -> None:
        if not 0 <= self.good_rate < self.bad_rate <= 1:
            raise ValueError(
                f"failure rates {self.good_rate:g} (good) and {self.bad_rate:g} (bad) cannot be told apart; "
                "give 0 <= good rate < bad rate <= 1"
            )
        for name, value in (("alpha", self.alpha), ("beta", self.beta)):
            if not 0 < value < 0.5:
                raise ValueError(f"{name} {value:g} is not an error probability of a test; give one between 0 and 0.5")
        if self.limit < 1:
            raise ValueError(f"a limit of {self.limit} trials leaves nothing to judge by; give at least 1")

    def log_ratio(self, failures: int, passes: int) -> float:
        """Log likelihood ratio of bad against good; infinite where a rate of 0 or 1 rules one of them out."""
        return failures * _log_ratio(self.bad_rate, self.good_rate) + passes * _log_ratio(
            1 - self.bad_rate, 1 - self.good_rate
        )

    def decide(self, failures: int, passes: int) -> Decision:
        """The decision after so many failures and passes; `more` asks for another trial."""
        if self.good_rate == 0 and failures:
            return "bad"
        if self.bad_rate == 1 and passes:
            return "good"
        ratio = self.log_ratio(failures, passes)
        if ratio >= math.log((1 - self.beta) / self.alpha):
            return "bad"
        if ratio <= math.log(self.beta / (1 - self.alpha)):
            return "good"
        return "undecided" if failures + passes >= self.limit else "more"

    def sentence(self, verdicts: int) -> str:
        """What the test guarantees, for one verdict and for all of them together (union bound)."""
        worst = max(self.alpha / (1 - self.beta), self.beta / (1 - self.alpha))
        return (
            f"sequential test between failure rates {self.good_rate:g} and {self.bad_rate:g}: a good commit is called "
            f"bad with probability {self.alpha:g}, a bad one good with {self.beta:g}; some of {verdicts} verdicts "
            f"wrong: at most {min(1.0, verdicts * worst):.2g}"
        )


def _log_ratio(numerator: float, denominator: float) -> float:
    if numerator == denominator:
        return 0.0
    if denominator == 0:
        return math.inf
    return math.log(numerator / denominator) if numerator else -math.inf
