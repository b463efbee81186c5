"""Accuracy and latency of a head against a base, paired seed by seed: what was measured, before anyone judges it."""

import json
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

from .record import Record, append_records, read_records
from .run_dir import MANIFEST, RECORDS

SCHEMA = "difftest.baseline/1"
SAVED = "baseline.json"
MACHINE = ("gpu", "machine", "cuda")
"""Facts of the environment without which two latencies have nothing to do with each other."""


class Key(NamedTuple):
    """What is compared: one metric of one stage of one path for one case and layer."""

    case: str
    layer: int
    path: str
    stage: str
    comparison: str
    metric: str

    def words(self) -> str:
        return f"{self.case} layer {self.layer} {self.path} {self.stage} {self.metric} ({self.comparison})"


@dataclass(frozen=True)
class Paired:
    """Values of one metric on both sides, by seed; `seeds`, `base` and `head` have one length."""

    key: Key
    seeds: list[int]
    base: list[float]
    head: list[float]


@dataclass(frozen=True)
class Timed:
    """Seconds of one stage of one path on both sides, paired by case, layer and seed in the order they were taken.

    repeats  pairs of base times of one case and layer at neighbouring seeds: the same code and shapes, so their ratios
             show the noise.
    """

    path: str
    stage: str
    base: list[float]
    head: list[float]
    repeats: list[tuple[float, float]]


@dataclass
class Side:
    """Records of one side with the seed of each, and the environments they were made in."""

    folder: str
    records: list[tuple[int, Record]]
    environments: list[dict[str, str]]

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Reads every records.jsonl below `folder`: a run, a saved baseline, or a directory of runs.

        A record's seed is its fact `seed`, else what its run added to the case's seed. ValueError names the folder or
        file and what is wrong with it.
        """
        files = sorted(folder.rglob(RECORDS)) if folder.is_dir() else []
        if not files:
            raise ValueError(
                f"{folder} holds no {RECORDS}; give a directory that `difftest run` or `baseline save` wrote"
            )
        records: list[tuple[int, Record]] = []
        environments: list[dict[str, str]] = []
        for file in files:
            manifest = _manifest(file.parent)
            cases = manifest.get("cases") or {}
            environments += manifest.get("environments") or [manifest.get("environment") or {}]
            records += [(_seed(record, cases), record) for record in read_records(file)]
        if not records:
            raise ValueError(f"{folder} holds no records: its runs ended before the first stage; run them again")
        return cls(str(folder), records, environments)

    def machine(self) -> dict[str, set[str]]:
        return {name: {facts[name] for facts in self.environments if facts.get(name)} for name in MACHINE}


def _manifest(folder: Path) -> dict[str, Any]:
    for name in (MANIFEST, SAVED):
        file = folder / name
        if file.is_file():
            try:
                raw = json.loads(file.read_text())
            except json.JSONDecodeError as error:
                raise ValueError(f"{file} is not whole JSON ({error}); run the cases again") from error
            return raw if isinstance(raw, dict) else {}
    return {}


def _seed(record: Record, cases: dict[str, Any]) -> int:
    known = record.facts.get("seed", cases.get(record.case, {}).get("base_seed", 0))
    if isinstance(known, bool) or not isinstance(known, int):
        raise ValueError(f"the seed of {record.case} is {known!r}, not a whole number; run the case again")
    return known


def save(runs: Path, out: Path, replace_old: bool = False) -> int:
    """Copies the records below `runs` into the baseline directory `out`, each with its seed; returns how many.

    ValueError if there are none, or if `out` is not empty and not a baseline that may be replaced.
    """
    side = Side.load(runs)
    if out.exists() and any(out.iterdir()) and not (replace_old and (out / SAVED).is_file()):
        hint = "pass --replace" if (out / SAVED).is_file() else "name another directory"
        raise ValueError(f"{out} is not empty, and a baseline is never overwritten unasked; {hint}")
    out.mkdir(parents=True, exist_ok=True)
    part = out / f"{RECORDS}.part"
    part.unlink(missing_ok=True)
    append_records(part, (replace(record, facts={**record.facts, "seed": seed}) for seed, record in side.records))
    part.replace(out / RECORDS)
    facts = {
        "schema": SCHEMA,
        "records": len(side.records),
        "seeds": sorted({seed for seed, _ in side.records}),
        "cases": {},
        "paths": sorted({record.path for _, record in side.records}),
        "environments": side.environments,
    }
    (out / SAVED).write_text(json.dumps(facts, indent=2, sort_keys=True) + "\n")
    return len(side.records)


@dataclass
class Comparison:
    """All that was measured on both sides, as data: `baseline_verdict.judge` gives it rows under any policy.

    unused    what only the base has, missing what only the head has: `case layer path stage metric`, or a seed.
    broken    metrics that are a number in the base and not in the head (or nothing was compared), with the reason.
    findings  structural findings that the head has and the base has not.
    mixed     facts of the machine that differ between the sides: latencies are not compared then.
    """

    base: str
    head: str
    paired: list[Paired]
    timed: list[Timed]
    unused: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    mixed: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            **asdict(self),
            "paired": [{**asdict(row), "key": list(row.key)} for row in self.paired],
        }

    @classmethod
    def from_json(cls, raw: Any) -> Self:
        """The comparison that `to_json` wrote. ValueError if it is none."""
        if not isinstance(raw, dict) or raw.get("schema") != SCHEMA:
            raise ValueError(
                f"this is no comparison of schema {SCHEMA}; compare the directories again with this version"
            )
        values = {name: value for name, value in raw.items() if name in cls.__dataclass_fields__}
        try:
            values["paired"] = [Paired(**{**row, "key": Key(*row["key"])}) for row in values["paired"]]
            values["timed"] = [Timed(**row) for row in values["timed"]]
            return cls(**values)
        except (KeyError, TypeError) as error:
            raise ValueError(f"this comparison is not whole ({error!r}); compare the directories again") from error


def compare(base: Path, head: Path) -> Comparison:
    """Pairs the records of two directories. ValueError names a directory that cannot be read."""
    first, second = Side.load(base), Side.load(head)
    made = Comparison(str(base), str(head), [], _timed(first, second))
    before, after = _metrics(first), _metrics(second)
    _pair(made, before, after)
    made.findings = sorted(_findings(second) - _findings(first))
    here, there = first.machine(), second.machine()
    made.mixed = [
        f"{name}: {', '.join(sorted(here[name]))} against {', '.join(sorted(there[name]))}"
        for name in MACHINE
        if here[name] and there[name] and here[name] != there[name]
    ]
    if made.mixed:
        made.timed = []
    return made


def _metrics(side: Side) -> dict[Key, dict[int, float]]:
    """Each metric by seed; several records of one seed count as their mean, a record with nothing compared as NaN."""
    found: dict[Key, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for seed, record in side.records:
        for metric, value in record.metrics.items():
            found[_key(record, metric)][seed].append(value)
    return {key: {seed: sum(values) / len(values) for seed, values in seeds.items()} for key, seeds in found.items()}


def _key(record: Record, metric: str) -> Key:
    return Key(record.case, record.layer, record.path, record.stage, record.comparison, metric)


def _pair(made: Comparison, before: dict[Key, dict[int, float]], after: dict[Key, dict[int, float]]) -> None:
    made.unused = _wholes(before.keys() - after.keys(), after.keys())
    made.missing = _wholes(after.keys() - before.keys(), before.keys())
    for key in sorted(before.keys() & after.keys()):
        seeds = sorted(before[key].keys() & after[key].keys())
        finite = [seed for seed in seeds if math.isfinite(before[key][seed]) and math.isfinite(after[key][seed])]
        lost = [seed for seed in seeds if math.isfinite(before[key][seed]) and not math.isfinite(after[key][seed])]
        made.broken += [
            f"{key.words()}: {after[key][seed]} at seed {seed}, was {before[key][seed]:.6g}" for seed in lost
        ]
        if finite:
            values = [before[key][seed] for seed in finite], [after[key][seed] for seed in finite]
            made.paired.append(Paired(key, finite, *values))
        made.unused += [f"{key.words()} seed {seed}" for seed in sorted(before[key].keys() - after[key].keys())]
        made.missing += [f"{key.words()} seed {seed}" for seed in sorted(after[key].keys() - before[key].keys())]


def _wholes(only: Iterable[Key], others: Iterable[Key]) -> list[str]:
    """Names of keys that one side lacks; of a path and case that it lacks altogether only these two."""
    whole = {(key.case, key.path) for key in others}
    names = {key.words() if (key.case, key.path) in whole else f"{key.case} {key.path} (all of it)" for key in only}
    return sorted(names)


def _findings(side: Side) -> set[str]:
    """Structural findings, and stages where nothing was compared, without their seeds, so that two sides can differ."""
    found = set()
    for _, record in side.records:
        where = f"{record.case} layer {record.layer} {record.path} {record.stage}"
        found |= {f"{where}: {finding.rule}" for finding in record.findings}
        if record.skipped:
            found.add(f"{where}: not compared, {record.skipped}")
    return found


def _timed(first: Side, second: Side) -> list[Timed]:
    before, after = _times(first), _times(second)
    rows: dict[tuple[str, str], Timed] = {}
    for where in sorted(before.keys() & after.keys()):
        path, stage = where[2:]
        row = rows.setdefault((path, stage), Timed(path, stage, [], [], []))
        ordered: list[float] = []
        for seed in sorted(before[where].keys()):
            pairs = list(zip(before[where][seed], after[where].get(seed, []), strict=False))
            row.base.extend(base for base, _ in pairs)
            row.head.extend(head for _, head in pairs)
            ordered += before[where][seed]
        row.repeats.extend(zip(ordered[::2], ordered[1::2], strict=False))
    return [row for row in rows.values() if row.base]


def _times(side: Side) -> dict[tuple[str, int, str, str], dict[int, list[float]]]:
    """Seconds of every stage by seed, from the fact `seconds` of isolated records: a number, or a list of repeats."""
    found: dict[tuple[str, int, str, str], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for seed, record in side.records:
        seconds = record.facts.get("seconds")
        if record.comparison == "isolated" and seconds is not None:
            samples = seconds if isinstance(seconds, list) else [seconds]
            kept = [float(sample) for sample in samples if isinstance(sample, int | float) and sample > 0]
            found[record.case, record.layer, record.path, record.stage][seed] += kept
    return found
