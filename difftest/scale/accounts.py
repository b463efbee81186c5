"""Every planned stage is accounted for: recorded once, or recorded as not compared, with the reason."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..record import Finding, Record
from ..stages import STAGES, StageName
from .locks import alive

PARTS = "records-*.jsonl"
RUNNING = "running-{pid}.json"


@dataclass(frozen=True)
class Planned:
    """One test of the plan: a stage of a path on a case and layer, and the kind of that layer."""

    case: str
    layer: int
    path: str
    stage: StageName
    kind: str

    @property
    def group(self) -> tuple[str, int, str]:
        return self.case, self.layer, self.path


def write_once(file: Path, items: Sequence[Any]) -> None:
    """Writes a list of dataclasses or dictionaries as JSON; a file that is there already is left alone."""
    if file.is_file():
        return
    part = file.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps([item if isinstance(item, dict) else asdict(item) for item in items]))
    part.replace(file)


def read_planned(file: Path) -> list[Planned]:
    return [Planned(**raw) for raw in json.loads(file.read_text())] if file.is_file() else []


def key(record: Record) -> tuple[Any, ...]:
    """What a record is about. Two records of one run with the same key are the same measurement made twice."""
    seed = record.facts.get("seed", 0)
    return record.case, record.layer, record.path, record.stage, record.comparison, record.against, seed


def seeded(records: Iterable[Record], cases: Mapping[str, Any]) -> list[Record]:
    """Records of a run with the seed that it added to their case as a fact, so that runs of other seeds stay apart."""
    seeds = {name: seed for name, case in cases.items() if (seed := case.get("base_seed", 0))}
    if not seeds:
        return list(records)
    return [replace(one, facts={"seed": seeds[one.case], **one.facts}) if one.case in seeds else one for one in records]


def unique(records: Iterable[Record]) -> list[Record]:
    """The first record of every key, or the first with findings: a unit that ran twice counts once, at its worst."""
    kept: dict[tuple[Any, ...], Record] = {}
    for record in records:
        first = kept.setdefault(key(record), record)
        if first is not record and record.findings and not first.findings:
            kept[key(record)] = record
    return list(kept.values())


def missing(planned: Iterable[Planned], records: Sequence[Record], why: Mapping[str, str]) -> Iterator[Record]:
    """A record for every planned stage that has none, saying why: the verdict on it is then `cannot judge`.

    A path that crashed or ran out of memory accounts for its later stages by that record. `why` gives reasons by unit
    name (`case-layerN`); without one the run ended first.
    """
    done = {
        (record.case, record.layer, record.path, record.stage) for record in records if record.comparison == "isolated"
    }
    ended = {(record.case, record.layer, record.path) for record in records if _ends_path(record)}
    for item in planned:
        if (*item.group, item.stage) in done or item.group in ended:
            continue
        reason = why.get(f"{item.case}-layer{item.layer}", "the run ended before it")
        yield Record(
            *item.group[:2], item.kind, item.path, item.stage, "isolated", "exact stage", skipped=f"not run: {reason}"
        )


def _ends_path(record: Record) -> bool:
    return record.skipped.startswith("out of memory") or any(finding.rule == "crash" for finding in record.findings)


@dataclass(frozen=True)
class Running:
    """A note of what a worker is at, kept on disk while it is: it outlives the worker."""

    folder: Path
    pid: int

    @property
    def file(self) -> Path:
        return self.folder / RUNNING.format(pid=self.pid)

    def start(self, case: str, layer: int, path: str) -> None:
        self.file.write_text(json.dumps({"case": case, "layer": layer, "path": path, "pid": self.pid}))

    def stop(self) -> None:
        self.file.unlink(missing_ok=True)


def killed(folder: Path) -> set[tuple[str, int, str]]:
    """(case, layer, path) that workers which have died were at."""
    found = set()
    for file in folder.glob(RUNNING.format(pid="*")):
        try:
            note = json.loads(file.read_text())
        except (ValueError, OSError):
            continue
        if not alive(int(note["pid"])):
            found.add((note["case"], note["layer"], note["path"]))
    return found


def killed_record(case: str, layer: int, kind: str, path: str) -> Record:
    """The record of a path whose process died: a crash at the first stage of its layer."""
    first: StageName = next(iter(STAGES)) if kind == "csa" else "kv"
    message = (
        "the process that ran this path died (killed, or a fault in native code); the stage it was at is not known"
    )
    return Record(case, layer, kind, path, first, "isolated", "exact stage", findings=[Finding("crash", message)])
