"""How two runs differ, in words: environment, verdicts and selections."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepdiff import DeepDiff

from .run_dir import RunDir
from .trace import Trace

SHOWN = 12
"""Lines of one kind before the rest is only counted."""


@dataclass(frozen=True)
class Selection:
    """Rows of one trace whose selected sets differ between the runs, and how many entries moved."""

    trace: str
    rows: int
    changed_rows: int
    changed_entries: int


@dataclass(frozen=True)
class Difference:
    """`environment` and `verdicts` are DeepDiff trees; `matters` is true when a verdict or a selection changed."""

    environment: dict[str, Any]
    verdicts: dict[str, Any]
    selections: list[Selection]
    notes: list[str]

    @property
    def matters(self) -> bool:
        return bool(self.verdicts) or any(part.changed_rows for part in self.selections)

    def to_json(self) -> dict[str, Any]:
        return {
            "environment": self.environment,
            "verdicts": self.verdicts,
            "selections": [vars(part) for part in self.selections],
            "notes": self.notes,
        }

    def sentences(self) -> Iterator[str]:
        yield from _shorten(list(_tell(self.environment, "environment")))
        yield from _shorten(list(_tell(self.verdicts, "verdict")))
        for part in self.selections:
            if part.changed_rows:
                yield (
                    f"selection: {part.trace} differs in {part.changed_rows} of {part.rows} rows, "
                    f"{part.changed_entries} entries in all"
                )
        yield from self.notes
        if not self.matters:
            yield "no verdict and no selection differs"


def compare(first: Path, second: Path) -> Difference:
    """Compares two run directories. ValueError names a directory or file that is not a run's."""
    one, two = RunDir.open(first), RunDir.open(second)
    selections, notes = _selections(one, two)
    return Difference(
        _tree(one.manifest.get("environment", {}), two.manifest.get("environment", {})),
        _tree(_verdicts(one), _verdicts(two)),
        selections,
        notes,
    )


def _tree(first: Any, second: Any) -> dict[str, Any]:
    return dict(DeepDiff(first, second, ignore_order=True, verbose_level=2).to_dict())


def _verdicts(run: RunDir) -> dict[str, str]:
    return {
        f"{verdict['case']} layer {verdict['layer']} {verdict['path']}": verdict["text"]
        for verdict in run.manifest.get("verdicts", [])
    }


def _selections(one: RunDir, two: RunDir) -> tuple[list[Selection], list[str]]:
    names = [{file.name for file in (run.path / "traces").glob("*.safetensors")} for run in (one, two)]
    both, notes = sorted(names[0] & names[1]), []
    alone = sorted(names[0] ^ names[1])
    if alone:
        notes.append(f"{len(alone)} traces are in one run only, so their selections were not compared: {alone[0]} ...")
    if not both:
        notes.append("no trace is in both runs; run with --keep all to compare selections")
    found = []
    for name in both:
        traces = [Trace.load(run.path / "traces" / name) for run in (one, two)]
        if any("topk" not in trace for trace in traces):
            continue
        picks = [trace.value("topk") for trace in traces]
        if picks[0].shape != picks[1].shape:
            notes.append(f"{name}: shapes {tuple(picks[0].shape)} and {tuple(picks[1].shape)} cannot be compared")
            continue
        moved = [len(set(a) ^ set(b)) // 2 for a, b in zip(picks[0].tolist(), picks[1].tolist(), strict=True)]
        found.append(Selection(name, len(moved), sum(map(bool, moved)), sum(moved)))
    return found, notes


def _tell(tree: dict[str, Any], what: str) -> Iterator[str]:
    for change in tree.get("values_changed", {}).items():
        where, values = change
        yield f"{what}: {_name(where)} was {values['old_value']!s}, is {values['new_value']!s}"
    for where, value in tree.get("dictionary_item_added", {}).items():
        yield f"{what}: {_name(where)} is new: {value!s}"
    for where, value in tree.get("dictionary_item_removed", {}).items():
        yield f"{what}: {_name(where)} is gone: it was {value!s}"
    for where, change in tree.get("type_changes", {}).items():
        yield f"{what}: {_name(where)} was {change['old_value']!r}, is {change['new_value']!r}"


def _shorten(lines: list[str]) -> Iterator[str]:
    yield from lines[:SHOWN]
    if len(lines) > SHOWN:
        yield f"... and {len(lines) - SHOWN} more differences of this kind; --json has them all"


def _name(where: str) -> str:
    return where.removeprefix("root[").strip("]'\"")
