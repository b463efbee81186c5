"""One measured comparison: a JSON line, judged later by a policy.

Metric, bound and verdict are three things: a record holds what was measured and the bound that was derived for it;
whether that is good enough is decided in `verdict.py`, and can be decided again from the file alone.
"""

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from .stages import StageName

SCHEMA = 1
Comparison = Literal["isolated", "accumulated"]


@dataclass(frozen=True)
class Finding:
    """A structural rule that was broken: no tolerance applies. `where` locates it ({"row": 3, "entry": 17})."""

    rule: str
    message: str
    where: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Worst:
    """The element that is furthest off in units of its bound, with both values."""

    where: dict[str, int]
    got: float
    want: float
    bound: float


@dataclass(frozen=True)
class Record:
    """What one stage of one path measured against the exact stage (isolated) or another path (accumulated).

    metrics  measured numbers by name. Isolated ones always have `excess`: the factor by which the derived bound would
             have to grow for every element to pass (<= 1 passes), and `deviation`, in the stage's own unit.
    bounds   derived bounds for metrics of the same name; a metric without one is a quality figure.
    skipped  why nothing was compared ("selection not exercised", "NaN in index_query[3, 0, 7]"); empty otherwise.
    """

    case: str
    layer: int
    kind: str
    path: str
    stage: StageName
    comparison: Comparison
    against: str
    metrics: dict[str, float] = field(default_factory=dict)
    bounds: dict[str, float] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    worst: Worst | None = None
    skipped: str = ""
    facts: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """One line of JSON. NaN and infinities become the strings "nan", "inf" and "-inf": JSON has no such numbers."""
        return json.dumps({"schema": SCHEMA, **_plain(asdict(self))})

    @classmethod
    def from_json(cls, line: str) -> "Record":
        raw = json.loads(line)
        if not isinstance(raw, dict) or raw.get("schema") != SCHEMA:
            found = raw.get("schema") if isinstance(raw, dict) else type(raw).__name__
            raise ValueError(f"record schema is {found!r}, this version reads {SCHEMA}; run the case again")
        raw.pop("schema")
        raw["metrics"] = {name: float(value) for name, value in raw["metrics"].items()}
        raw["bounds"] = {name: float(value) for name, value in raw["bounds"].items()}
        raw["findings"] = [Finding(**finding) for finding in raw["findings"]]
        if raw["worst"]:
            worst = raw["worst"]
            raw["worst"] = Worst(worst["where"], *(float(worst[name]) for name in ("got", "want", "bound")))
        return cls(**raw)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def append_records(file: Path, records: Iterable[Record]) -> None:
    """Appends whole lines and flushes, so that an interrupted run leaves readable records."""
    with file.open("a") as lines:
        for record in records:
            lines.write(record.to_json() + "\n")
        lines.flush()


def read_records(file: Path) -> Iterator[Record]:
    """Reads a records file. ValueError names file, line and fault; a torn last line (interrupted write) is left out."""
    text = file.read_text()
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield Record.from_json(line)
        except (ValueError, TypeError, KeyError) as error:
            if number == len(lines):
                return
            raise ValueError(f"{file}:{number} is not a difftest record: {error}") from error
