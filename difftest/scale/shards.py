"""Shards of a pytest run by recorded durations: pytest-split's algorithms over whole units instead of single tests.

The tests of one case and layer share one run of it, so a split between them would run it in both shards.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

UNIT = re.compile(r"::test_stage\[(?P<unit>.+?-layer\d+)-")


@dataclass(frozen=True)
class Shard:
    """Which part of a plan this run is. Written into run.json, checked by `difftest merge`.

    plan    digest of the names of all units of the whole plan: shards of different plans do not belong together.
    units   units of this shard.   all_units  number of units in the whole plan.
    """

    group: int
    splits: int
    plan: str
    units: list[str]
    all_units: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> "Shard":
        return cls(**{name: raw[name] for name in cls.__dataclass_fields__})


@dataclass
class _Stand:
    """Stands for a unit in pytest-split's algorithms, which read `nodeid` alone."""

    nodeid: str


def plan_digest(units: Iterable[str]) -> str:
    """Identifies a plan by the names of its units, whatever their order."""
    return hashlib.sha256("\n".join(sorted(set(units))).encode()).hexdigest()[:16]


def unit_of_id(nodeid: str) -> str:
    """`case-layerN` of the id of one of the suite's tests, an empty string for any other test."""
    found = UNIT.search(nodeid)
    return found["unit"] if found else ""


def bare(nodeid: str) -> str:
    """A test's function and parameters: without its file, which depends on where pytest was started, and without the
    group that pytest-xdist appends (`...]@gaussian-2117-layer2`)."""
    head, mark, tail = nodeid.rpartition("]@")
    return (f"{head}]" if mark and "]" not in tail else nodeid).rpartition("::")[2]


def unit_seconds(tests: Mapping[str, str], durations: Mapping[str, float]) -> dict[str, float]:
    """Recorded seconds of each unit that has any: the sum over its tests. `tests` gives the unit of each test id."""
    total: dict[str, float] = {}
    for nodeid, spent in durations.items():
        unit = tests.get(bare(nodeid))
        if unit is not None:
            total[unit] = total.get(unit, 0.0) + spent
    return total


def split(units: Sequence[str], durations: Mapping[str, float], splits: int, algorithm: str) -> list[list[str]]:
    """Units of each of `splits` shards, by pytest-split's algorithm of this name; every unit is in exactly one."""
    from pytest_split.algorithms import Algorithms

    stands = [_Stand(unit) for unit in units]
    groups = Algorithms[algorithm].value(splits, cast(Any, stands), dict(durations))
    return [[item.nodeid for item in group.selected] for group in groups]
