"""Which units of work fit into a time budget, those first that catch most for their cost."""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .. import cases
from ..cases import registry
from ..cases.case import Case
from ..stages import stages_of

KILL_MATRIX = Path(cases.__path__[0]) / "kill_matrix.json"
UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
AMOUNT = re.compile(r"(\d+(?:\.\d+)?)([smh]?)")


@dataclass(frozen=True)
class Candidate:
    """A unit of work with its cost in seconds and the mutants that its case kills."""

    name: str
    seconds: float
    kills: frozenset[str] = frozenset()


@dataclass(frozen=True)
class LeftOut:
    """A unit that did not fit, what it would have cost, and the mutants that only left-out units kill."""

    name: str
    seconds: float
    lost: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Choice:
    """Units in the order in which they run, and those left out. Consumed by the pytest plugin and the reports."""

    chosen: list[str]
    left_out: list[LeftOut]
    seconds: float
    budget: float
    costs: dict[str, float]

    def cost(self, name: str) -> float:
        return self.costs.get(name, 0.0)


def parse_budget(text: str) -> float:
    """Seconds of "90", "90s", "6m" or "1h30m". ValueError for anything else."""
    pieces = AMOUNT.findall(text)
    if not pieces or "".join(amount + unit for amount, unit in pieces) != text.strip():
        raise ValueError(f"budget {text!r} is no time span: write seconds, or 90s, 6m, 1h30m")
    total = sum(float(amount) * UNITS[unit] for amount, unit in pieces)
    if total <= 0:
        raise ValueError(f"budget {text!r} leaves no time: give more than 0 seconds")
    return total


def choose(candidates: Sequence[Candidate], budget: float, workers: int = 1) -> Choice:
    """Orders units by what they catch for their cost and takes those that fit into `budget` seconds of each worker.

    Greedy weighted cover: the next unit is the one with most mutants not yet killed a second, then the one with most
    kills a second, then the cheapest; ties keep the given order. A unit that no longer fits is left out, a cheaper one
    after it may still fit. The first unit always runs, so that a budget below the cheapest still checks something.
    """
    waiting, covered, spent = list(candidates), frozenset[str](), 0.0
    chosen: list[str] = []
    left: list[Candidate] = []
    while waiting:
        best = max(waiting, key=lambda unit: _worth(unit, covered))
        waiting.remove(best)
        if chosen and spent + best.seconds > budget * workers:
            left.append(best)
            continue
        chosen.append(best.name)
        covered |= best.kills
        spent += best.seconds
    out = [LeftOut(unit.name, round(unit.seconds, 2), tuple(sorted(unit.kills - covered))) for unit in left]
    return Choice(chosen, out, spent, budget, {unit.name: round(unit.seconds, 2) for unit in candidates})


def _worth(unit: Candidate, covered: frozenset[str]) -> tuple[float, float, float]:
    cost = max(unit.seconds, 1e-3)
    return len(unit.kills - covered) / cost, len(unit.kills) / cost, -cost


@dataclass(frozen=True)
class Kill:
    """One mutant that the matrix shows killed: by which case, of which family and mode, at which stage."""

    mutant: str
    case: str
    stage: str
    family: str
    mode: str

    def also_by(self, case: Case, layer: int) -> bool:
        """Whether `case` would show the mutant too: it is the case, or of its mode, with the stage and such data.

        A mutant that shows on Gaussian data shows on any; one that needs a special family needs that family.
        """
        if case.id == self.case:
            return True
        alike = case.mode == self.mode and self.family in ("gaussian", case.family)
        return alike and (not self.stage or self.stage in stages_of(case.config.kind(layer)))


def read_kills(file: Path = KILL_MATRIX) -> list[Kill]:
    """Killed mutants of the kill matrix, each with the case that it was tried on; empty where there is no matrix.

    ValueError for a file of another kind.
    """
    if not file.is_file():
        return []
    try:
        rows = json.loads(file.read_text())["rows"]
        known = _bench_cases() | registry.all_cases()
        return [
            Kill(
                f"{row['mutant']}@{row['path']}",
                row["case"],
                row.get("stage_seeded", ""),
                known[row["case"]].family if row["case"] in known else "",
                known[row["case"]].mode if row["case"] in known else "",
            )
            for row in rows
            if row["killed_by"]
        ]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{file} is no kill matrix ({error!r}); write one with `difftest mutants matrix`") from error


def _bench_cases() -> dict[str, Case]:
    """The small cases that mutants are tried on, by id."""
    from ..mutants import bench_cases

    return {case.id: case for case in vars(bench_cases).values() if isinstance(case, Case)}
