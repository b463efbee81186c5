"""Policies: what a measured record has to reach. TOML with comments; a saved run can be judged again under any."""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from .record import Record
from .stages import StageName, check_stage, nearest

SHIPPED = ("strict", "default", "exploratory")
FOLDER = Path(__file__).parent / "policies"

Unexercised = Literal["cannot judge", "agrees"]
AccumulatedFindings = Literal["bug", "note"]


@dataclass(frozen=True)
class Budget:
    """A quality figure of accumulated records against the oracle: at least `min`, at most `max`."""

    stage: StageName
    metric: str
    min: float | None = None
    max: float | None = None

    def missed(self, record: Record) -> bool:
        """Whether this record has the figure and it is outside the budget (NaN is)."""
        value = record.metrics.get(self.metric)
        if record.stage != self.stage or value is None:
            return False
        above = self.min is None or value >= self.min
        below = self.max is None or value <= self.max
        return not (above and below)

    def __str__(self) -> str:
        limits = [f"at least {self.min:g}" for _ in [0] if self.min is not None]
        limits += [f"at most {self.max:g}" for _ in [0] if self.max is not None]
        return f"{self.stage} {self.metric} {' and '.join(limits)}"


@dataclass(frozen=True)
class Policy:
    """What `judge` applies to records.

    isolated   factor on the derived bound of each listed metric; other metrics are only shown.
    budgets    quality figures; one missed without an isolated failure is "explained by format".
    unexercised            verdict of a layer none of whose rows had to select.
    accumulated_findings   whether an accumulated finding is a bug, or only noted.
    format_fails           whether "explained by format" fails a run (exit code 1).
    """

    name: str
    says: str
    isolated: dict[str, float]
    budgets: tuple[Budget, ...] = ()
    unexercised: Unexercised = "cannot judge"
    accumulated_findings: AccumulatedFindings = "bug"
    format_fails: bool = False


def load_policy(name_or_path: str | Path) -> Policy:
    """A shipped policy by name (strict, default, exploratory) or any TOML file by path.

    ValueError names the file, the key and what is allowed.
    """
    file = FOLDER / f"{name_or_path}.toml" if str(name_or_path) in SHIPPED else Path(name_or_path)
    if not file.is_file():
        if file.suffix == ".toml":
            raise ValueError(f"no policy file {file}: give one of {', '.join(SHIPPED)} or the path of a TOML file")
        raise ValueError(nearest(str(name_or_path), list(SHIPPED), "policy").replace("policys", "policies"))
    try:
        return parse_policy(tomllib.loads(file.read_text()))
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{file} is not a policy: {error}") from error


def parse_policy(raw: dict[str, Any]) -> Policy:
    """A policy from parsed TOML. ValueError for unknown keys and values."""
    known = {"name", "says", "isolated", "budget", "unexercised", "accumulated_findings", "format_fails"}
    unknown = set(raw) - known
    if unknown:
        raise ValueError(f"unknown key {', '.join(sorted(unknown))}; keys are {', '.join(sorted(known))}")
    missing = {"name", "isolated"} - set(raw)
    if missing:
        raise ValueError(f"key {', '.join(sorted(missing))} is missing")
    for key, allowed in (("unexercised", Unexercised), ("accumulated_findings", AccumulatedFindings)):
        if raw.get(key, get_args(allowed)[0]) not in get_args(allowed):
            raise ValueError(f"{key} is {raw[key]!r}: choose {' or '.join(get_args(allowed))}")
    if not isinstance(raw.get("format_fails", False), bool):
        raise ValueError(f"format_fails is {raw['format_fails']!r}: write true or false")
    factors = {name: float(factor) for name, factor in raw["isolated"].items()}
    for name, factor in factors.items():
        if not factor > 0:
            raise ValueError(f"isolated.{name} is {factor}: a factor on a bound must be positive")
    return Policy(
        raw["name"],
        raw.get("says", ""),
        factors,
        tuple(_budget(budget) for budget in raw.get("budget", [])),
        raw.get("unexercised", "cannot judge"),
        raw.get("accumulated_findings", "bug"),
        raw.get("format_fails", False),
    )


def _budget(raw: dict[str, Any]) -> Budget:
    unknown = set(raw) - set(Budget.__dataclass_fields__)
    if unknown:
        raise ValueError(f"a budget has no key {', '.join(sorted(unknown))}: stage, metric, min, max are its keys")
    if "min" not in raw and "max" not in raw:
        raise ValueError(f"the budget of {raw.get('stage')} {raw.get('metric')} has neither min nor max: give one")
    limits = {name: float(raw[name]) for name in ("min", "max") if name in raw}
    return Budget(check_stage(raw["stage"]), raw["metric"], **limits)
