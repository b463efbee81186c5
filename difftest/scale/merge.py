"""Joins the results of shards into one run, and notices shards that are missing, doubled or of another plan."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..record import Record
from ..run_dir import RunDir
from ..verdict import Verdict, judge, load_policy
from .accounts import key, seeded, unique
from .shards import Shard

SAME_EVERYWHERE = ("paths", "layers", "device")
"""Facts of a manifest that shards of one plan share."""


@dataclass
class Merged:
    """The joined run. `problems` say what is missing, doubled or does not belong; with any the result is not green."""

    folder: Path
    records: list[Record]
    verdicts: list[Verdict]
    problems: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """1 if something disagrees, 125 if a shard is missing or doubled or something cannot be judged, else 0."""
        codes = {verdict.exit_code for verdict in self.verdicts}
        if 1 in codes:
            return 1
        return 125 if self.problems or 125 in codes or not self.verdicts else 0


def merge(folders: Sequence[Path], out: Path, policy: str = "default") -> Merged:
    """Joins run directories into a new one at `out`.

    Records that several runs hold count once. ValueError for a directory that is no run, FileExistsError for an `out`
    that is not empty.
    """
    runs = [RunDir.open(folder) for folder in folders]
    problems = [*_shard_problems(runs), *_state_problems(runs), *_mixed(runs)]
    parts = [seeded(run.records(), run.manifest.get("cases") or {}) for run in runs]
    problems += _doubled(folders, parts)
    records = unique(record for part in parts for record in part)
    chosen = load_policy(policy)
    verdicts = judge(records, chosen)
    made = RunDir.create(
        out,
        merged=[folder.name for folder in folders],
        environment=_environment(runs),
        cases={name: case for run in runs for name, case in (run.manifest.get("cases") or {}).items()},
        left_out=[unit for run in runs for unit in run.manifest.get("left_out") or []],
        **{name: _joined(run.manifest.get(name) for run in runs) for name in SAME_EVERYWHERE},
    )
    made.append(records)
    made.write_manifest(
        status="incomplete" if problems else "complete",
        problems=problems,
        policy=chosen.name,
        verdicts=[verdict.to_json() for verdict in verdicts],
        skipped_paths={path: why for run in runs for path, why in (run.manifest.get("skipped_paths") or {}).items()},
    )
    return Merged(out, records, verdicts, problems)


def _shard_problems(runs: Sequence[RunDir]) -> list[str]:
    """What is wrong with the set of shards: other plans, missing ones, double ones, units that are in none."""
    raw = [(run.path.name, run.manifest.get("shard")) for run in runs]
    shards = [(name, Shard.from_json(shard)) for name, shard in raw if shard]
    if not shards:
        return []
    problems = [f"{name} is no shard, the others are" for name, shard in raw if not shard]
    plans = Counter((shard.plan, shard.splits) for _, shard in shards)
    plan, splits = plans.most_common(1)[0][0]
    problems += [
        f"{name} is a shard of another plan: it was split from other cases, paths or options"
        for name, shard in shards
        if (shard.plan, shard.splits) != (plan, splits)
    ]
    mine = [(name, shard) for name, shard in shards if (shard.plan, shard.splits) == (plan, splits)]
    groups = Counter(shard.group for _, shard in mine)
    problems += [f"shard {group} of {splits} is missing" for group in range(1, splits + 1) if group not in groups]
    for group in sorted(group for group, count in groups.items() if count > 1):
        names = ", ".join(name for name, shard in mine if shard.group == group)
        problems.append(f"shard {group} of {splits} is there {groups[group]} times: {names}")
    held = Counter(unit for group in groups for unit in next(shard.units for _, shard in mine if shard.group == group))
    problems += [f"{unit} is in several shards: they were split with different durations" for unit in _several(held)]
    if len(groups) == splits and len(held) < mine[0][1].all_units:
        missing = mine[0][1].all_units - len(held)
        problems.append(f"{missing} cases are in no shard: they were split with different durations")
    return problems


def _several(counts: Counter[str]) -> list[str]:
    return sorted(name for name, count in counts.items() if count > 1)


def _state_problems(runs: Sequence[RunDir]) -> list[str]:
    problems = []
    for run in runs:
        if run.manifest["status"] != "complete":
            problems.append(f"{run.path.name} is {run.manifest['status']}: it holds what was finished before")
        if run.manifest.get("not_run"):
            problems.append(f"{run.manifest['not_run']} planned stages of {run.path.name} were never run")
    return problems


def _mixed(runs: Sequence[RunDir]) -> list[str]:
    """Differences between the runs that make their results no single result: other code, other paths."""
    found = []
    for name in ("commit", "difftest", "torch", "sglang"):
        values = {(run.manifest.get("environment") or {}).get(name, "") for run in runs}
        if len(values) > 1:
            found.append(f"the runs differ in {name}: {', '.join(sorted(value or 'none' for value in values))}")
    for name in SAME_EVERYWHERE:
        texts = {json.dumps(run.manifest.get(name)) for run in runs}
        if len(texts) > 1 and all(run.manifest.get("shard") for run in runs):
            found.append(f"the shards differ in {name}: {', '.join(sorted(texts))}")
    return found


def _doubled(folders: Sequence[Path], parts: Sequence[list[Record]]) -> list[str]:
    """One sentence for each pair of runs that hold the same measurements."""
    first: dict[tuple[Any, ...], Path] = {}
    shared: Counter[tuple[str, str]] = Counter()
    for folder, part in zip(folders, parts, strict=True):
        for record in part:
            owner = first.setdefault(key(record), folder)
            if owner != folder:
                shared[owner.name, folder.name] += 1
    return [
        f"{one} and {two} hold {count} of the same records; each counts once" for (one, two), count in shared.items()
    ]


def _joined(values: Iterable[Any]) -> Any:
    """The value if all have the same; of lists the union; else all texts in one."""
    found = [value for value in values if value is not None]
    if not found:
        return None
    if all(isinstance(value, list) for value in found):
        return list(dict.fromkeys(item for value in found for item in value))
    return found[0] if all(value == found[0] for value in found) else ", ".join(sorted({str(value) for value in found}))


def _environment(runs: Sequence[RunDir]) -> dict[str, str]:
    names = list(dict.fromkeys(name for run in runs for name in run.manifest.get("environment") or {}))
    return {name: _joined((run.manifest.get("environment") or {}).get(name) for run in runs) or "" for name in names}
