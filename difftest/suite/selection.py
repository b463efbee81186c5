"""Which collected tests run: those of one shard, or those that fit into a budget; and what was planned."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from ..cases.case import Case
from ..scale.accounts import Planned
from ..scale.budget import Candidate, Choice, choose, parse_budget, read_kills
from ..scale.needs import recorded_seconds, seconds
from ..scale.shards import Shard, bare, plan_digest, split, unit_seconds


@dataclass
class Selection:
    """What was decided at collection: the shard and the budget's choice, None where not asked for."""

    shard: Shard | None = None
    choice: Choice | None = None


def select(config: pytest.Config, items: list[pytest.Item]) -> Selection:
    """Applies --splits/--group, then --difftest-budget, to the collected items. UsageError for a wrong budget."""
    selection = Selection(apply_shard(config, items))
    if hasattr(config, "workerinput"):
        _longest_first(config, items)
    budget = config.getoption("--difftest-budget")
    if budget:
        try:
            selection.choice = apply_budget(config, items, parse_budget(budget))
        except ValueError as error:
            raise pytest.UsageError(str(error)) from error
    return selection


def facts(config: pytest.Config, selection: Selection) -> dict[str, Any]:
    """What run.json says of this session: cases and paths, the shard, what was left out."""
    from .plan import plan_of

    plan = plan_of(config)
    return {
        "cases": {case.id: asdict(case) for case in plan.cases},
        "paths": list(plan.paths),
        "layers": list(plan.layers),
        "device": plan.device,
        "shard": selection.shard.to_json() if selection.shard else None,
        "left_out": [unit.to_json() for unit in selection.choice.left_out] if selection.choice else [],
        "expected_seconds": selection.choice.seconds if selection.choice else 0.0,
    }


def unit_of(item: pytest.Item) -> str:
    """`case-layerN` of a test of the suite, an empty string for any other test."""
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    return (
        f"{parameters['case'].id}-layer{parameters['layer']}" if {"case", "layer", "stage"} <= set(parameters) else ""
    )


def planned_of(items: Sequence[pytest.Item]) -> list[Planned]:
    """The plan as data, from the suite's tests that will run; those marked to be skipped are no part of it."""
    from ..paths.base import get_path

    names: dict[str, str] = {}
    found = []
    for item in items:
        if not unit_of(item) or item.get_closest_marker("skip"):
            continue
        given = item.callspec.params  # type: ignore[attr-defined]
        spec, case, layer = given["path"], given["case"], given["layer"]
        name = names.setdefault(spec, get_path(spec).name)
        found.append(Planned(case.id, layer, name, given["stage"], case.config.kind(layer)))
    return found


def apply_shard(config: pytest.Config, items: list[pytest.Item]) -> Shard | None:
    """Keeps the units of this shard, in place of pytest-split's own choice of single tests; None without --splits."""
    splits, group = (getattr(config.option, name, None) for name in ("splits", "group"))
    if not splits or not group or not any(map(unit_of, items)):
        return None
    unit_by_item = {id(item): unit_of(item) or item.nodeid for item in items}
    tests = {bare(item.nodeid): unit_by_item[id(item)] for item in items}
    units = list(dict.fromkeys(unit_by_item.values()))
    parts = split(units, unit_seconds(tests, durations(config)), splits, config.option.splitting_algorithm)
    mine = parts[group - 1]
    _keep(config, items, [item for item in items if unit_by_item[id(item)] in set(mine)])
    config.option.splits = config.option.group = 1  # pytest-split, whose turn comes next, then keeps all that is left
    return Shard(group, splits, plan_digest(units), mine, len(units))


def durations(config: pytest.Config) -> dict[str, float]:
    """Recorded durations by test id, from pytest-split's file; empty without it."""
    file = Path(getattr(config.option, "durations_path", "") or "")
    raw = json.loads(file.read_text()) if file.is_file() else {}
    return {str(name): float(spent) for name, spent in (raw.items() if isinstance(raw, dict) else raw)}


def apply_budget(config: pytest.Config, items: list[pytest.Item], budget: float) -> Choice:
    """Reorders the suite's tests by what their case catches for its cost, and deselects what does not fit."""
    of_unit = _by_unit(items)
    others = of_unit.pop("", [])
    costs = _costs(config, of_unit)
    matrix = config.getoption("--difftest-kill-matrix")
    kills = read_kills(Path(matrix)) if matrix else read_kills()
    candidates = [
        Candidate(unit, costs[unit], frozenset(kill.mutant for kill in kills if kill.also_by(*_place(some[0]))))
        for unit, some in of_unit.items()
    ]
    workers = int(getattr(config, "workerinput", {}).get("workercount", 1))
    choice = choose(candidates, budget, workers)
    _keep(config, items, [*(item for unit in choice.chosen for item in of_unit[unit]), *others])
    return choice


def _by_unit(items: Sequence[pytest.Item]) -> dict[str, list[pytest.Item]]:
    found: dict[str, list[pytest.Item]] = {}
    for item in items:
        found.setdefault(unit_of(item), []).append(item)
    return found


def _costs(config: pytest.Config, of_unit: Mapping[str, list[pytest.Item]]) -> dict[str, float]:
    """Expected seconds of every unit: as pytest-split recorded them here, as shipped, or estimated."""
    tests = {bare(item.nodeid): unit for unit, some in of_unit.items() for item in some}
    measured = recorded_seconds() | unit_seconds(tests, durations(config))
    return {unit: seconds(*_place(some[0]), measured) for unit, some in of_unit.items()}


def _place(item: pytest.Item) -> tuple[Case, int]:
    """Case and layer of one of the suite's tests."""
    given = item.callspec.params  # type: ignore[attr-defined]
    return given["case"], given["layer"]


def _longest_first(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Orders units by expected seconds, longest first, so that workers end at about the same time."""
    of_unit = _by_unit(items)
    others = of_unit.pop("", [])
    costs = _costs(config, of_unit)
    ordered = sorted(of_unit, key=lambda unit: -costs[unit])
    items[:] = [*(item for unit in ordered for item in of_unit[unit]), *others]


def _keep(config: pytest.Config, items: list[pytest.Item], kept: list[pytest.Item]) -> None:
    chosen = {id(item) for item in kept}
    gone = [item for item in items if id(item) not in chosen]
    items[:] = kept
    if gone:
        config.hook.pytest_deselected(items=gone)
