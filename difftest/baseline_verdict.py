"""Judges a comparison under a policy: what moved, by how much, outside the noise or not."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np

from .baseline import Comparison, Key, Paired, Timed
from .baseline_policy import BaselinePolicy
from .baseline_stats import Floats, bootstrap_interval, noise_floor, seeds_needed, sign_flip

Answer = Literal["worse", "better", "moved", "noise", "same", "too few seeds"]
Speed = Literal["slower", "faster", "same", "cannot judge"]
INTERVAL = 0.95
"""Confidence of the interval shown beside a mean difference."""
AGREES, DISAGREES, CANNOT_JUDGE = 0, 1, 125


@dataclass(frozen=True)
class Row:
    """One metric's paired differences (head - base).

    mean and its 95 % interval; effect: mean over standard deviation, 0 for none; p and p adjusted over all rows; the
    worst seed in the direction of harm and its difference; the answer with its reason.
    """

    key: Key
    seeds: int
    base: float
    head: float
    mean: float
    interval: tuple[float, float]
    effect: float
    p: float
    adjusted: float
    worst_seed: int
    worst: float
    answer: Answer
    why: str = ""


@dataclass(frozen=True)
class SpeedRow:
    """One stage's time of head over base: median ratio, its interval, and the noise floor as a share."""

    path: str
    stage: str
    samples: int
    ratio: float
    interval: tuple[float, float]
    floor: float
    answer: Speed
    why: str = ""


@dataclass
class Judged:
    """Produced by `judge`, consumed by the reports; `comparison` is what it was made of, so it can be judged again."""

    policy: str
    comparison: Comparison
    rows: list[Row]
    speeds: list[SpeedRow]
    fails: list[str] = field(default_factory=list)
    unsure: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """0 nothing got worse, 1 something did, 125 nothing paired, or too few seeds or too much noise to say."""
        if self.fails:
            return DISAGREES
        return CANNOT_JUDGE if self.unsure else AGREES

    def sentence(self) -> str:
        """The conclusion in one line."""
        if self.fails:
            return f"worse than the base: {self.fails[0]}" + _more(self.fails)
        if self.unsure:
            return f"cannot judge: {self.unsure[0]}" + _more(self.unsure)
        better = sum(row.answer == "better" for row in self.rows) + sum(row.answer == "faster" for row in self.speeds)
        return f"nothing got worse in {len(self.rows)} metrics and {len(self.speeds)} times; {better} got better"

    def to_json(self) -> dict[str, Any]:
        rows = [{**asdict(row), "key": row.key._asdict()} for row in self.rows]
        made = {"policy": self.policy, "sentence": self.sentence(), "exit_code": self.exit_code, "rows": rows}
        said = {"latency": [_speed_json(row) for row in self.speeds], "fails": self.fails, "unsure": self.unsure}
        return {**made, **said, "comparison": self.comparison.to_json()}


def _speed_json(row: SpeedRow) -> dict[str, Any]:
    """JSON has no infinity: an unknown noise floor is null."""
    return {**asdict(row), "floor": row.floor if math.isfinite(row.floor) else None}


def _more(reasons: list[str]) -> str:
    return f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""


def judge(comparison: Comparison, policy: BaselinePolicy) -> Judged:
    """Rows, their answers and the exit code, from measurements alone."""
    kept = [row for row in comparison.paired if not policy.ignores(row.key.metric)]
    judged = Judged(policy.name, comparison, _rows(kept, policy), [_speed(row, policy) for row in comparison.timed])
    judged.fails += [f"{row.key.words()} {row.why}" for row in judged.rows if row.answer == "worse"]
    judged.fails += [f"{row.path} {row.stage} {row.why}" for row in judged.speeds if row.answer == "slower"]
    judged.fails += [f"new finding: {finding}" for finding in comparison.findings] + comparison.broken
    if policy.unpaired == "fail":
        judged.fails += [f"unused baseline: {name}" for name in comparison.unused]
        judged.fails += [f"missing baseline: {name}" for name in comparison.missing]
    if not comparison.paired:
        judged.unsure.append("no metric has a value on both sides; compare runs of the same cases, paths and seeds")
    judged.unsure += _few_seeds(judged.rows, policy)
    judged.unsure += [
        f"{row.path} {row.stage} time: {row.why}" for row in judged.speeds if row.answer == "cannot judge"
    ]
    return judged


def _few_seeds(rows: list[Row], policy: BaselinePolicy) -> list[str]:
    few = [row for row in rows if row.answer == "too few seeds"]
    if not few:
        return []
    return [
        f"{few[0].key.words()} differs, but {few[0].seeds} paired seeds cannot tell a change from noise at "
        f"{policy.alpha:g}; run at least {seeds_needed(policy.alpha)} ({len(few)} such metrics)"
    ]


def _rows(paired: list[Paired], policy: BaselinePolicy) -> list[Row]:
    seeds = sorted({seed for row in paired for seed in row.seeds})
    column = {seed: number for number, seed in enumerate(seeds)}
    differences = np.full((len(paired), len(seeds)), np.nan)
    for number, row in enumerate(paired):
        differences[number, [column[seed] for seed in row.seeds]] = np.subtract(row.head, row.base)
    if not paired:
        return []
    test = sign_flip(differences)
    return [_row(row, policy, float(test.p[i]), float(test.adjusted[i])) for i, row in enumerate(paired)]


def _row(row: Paired, policy: BaselinePolicy, p: float, adjusted: float) -> Row:
    differences: Floats = np.subtract(row.head, row.base)
    direction = policy.direction(row.key.metric, row.key.comparison)
    harm = -differences if direction == "higher" else differences if direction == "lower" else np.abs(differences)
    spread = float(differences.std(ddof=1)) if len(differences) > 1 else 0.0
    mean, worst = float(differences.mean()), int(harm.argmax())
    base, head = float(np.mean(row.base)), float(np.mean(row.head))
    made: Callable[[Answer, str], Row] = lambda answer, why: Row(  # noqa: E731
        row.key, len(row.seeds), base, head, mean, bootstrap_interval(differences, INTERVAL),
        mean / spread if spread else 0.0, p, adjusted, row.seeds[worst], float(differences[worst]), answer, why,
    )  # fmt: skip
    if not differences.any():
        return made("same", "")
    limit = policy.seed_limit(row.key.metric, base)
    if direction != "neither" and harm[worst] > limit:
        return made("worse", f"is off by {differences[worst]:+.4g} at seed {row.seeds[worst]}, limit {limit:.4g}")
    if adjusted > policy.alpha:
        enough = len(row.seeds) >= seeds_needed(policy.alpha) or direction == "neither"
        return made("noise" if enough else "too few seeds", "")
    return made(*_moved(direction, mean, policy.tolerates(row.key.metric, base), adjusted))


def _moved(direction: str, mean: float, tolerated: float, adjusted: float) -> tuple[Answer, str]:
    """The answer for a mean that moved outside the noise."""
    why = f"moved by {mean:+.4g} (p {adjusted:.2g}), tolerated {tolerated:.4g}"
    if direction == "neither" or abs(mean) <= tolerated:
        return "moved", why
    return ("better" if (mean > 0) == (direction == "higher") else "worse"), why


def _speed(row: Timed, policy: BaselinePolicy) -> SpeedRow:
    logs: Floats = np.log(row.head) - np.log(row.base)
    repeats: Floats = np.array([math.log(second / first) for first, second in row.repeats])
    ratio, level = float(np.exp(np.median(logs))), policy.latency_level
    low, high = (math.exp(end) for end in bootstrap_interval(logs, level, "median"))
    floor = math.expm1(noise_floor(repeats, len(logs), level)) if len(repeats) else math.inf
    allowed = max(floor, policy.latency_tolerated)

    def made(answer: Speed, why: str = "") -> SpeedRow:
        return SpeedRow(row.path, row.stage, len(logs), ratio, (low, high), floor, answer, why)

    if floor > policy.latency_noise:
        shown = f"{floor:.0%}" if math.isfinite(floor) else "unknown (the base has no two times of one case)"
        return made("cannot judge", f"the noise floor is {shown}, above {policy.latency_noise:.0%}; run more seeds")
    why = f"takes {ratio:.3f} times as long (at least {low:.3f}), allowed {1 + allowed:.3f}"
    if low > 1 + allowed:
        return made("slower", why)
    return made("faster" if high < 1 / (1 + allowed) else "same")
