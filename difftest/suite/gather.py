"""The end of a session: workers' records become one file, what never ran is recorded as such, and all is judged."""

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..record import Record, append_records, read_records
from ..run_dir import RECORDS, RunDir
from ..scale.accounts import PARTS, Planned, killed, killed_record, missing, read_planned, unique
from ..verdict import Verdict, judge, load_policy, overall
from .hooks import FACTS, LEFT, PLANNED


@dataclass(frozen=True)
class Gathered:
    """Verdicts of a session, units left out for the budget, and how many planned stages nothing ran."""

    verdicts: list[Verdict]
    left_out: list[dict[str, Any]]
    not_run: int
    seconds: float
    out: str | None
    shard: dict[str, Any] | None = None

    def lines(self, shown: int) -> Iterator[str]:
        """The summary: one line a path, what was left out or lost, and where the records are."""
        for summary in overall(self.verdicts):
            counts = ", ".join(f"{count} {answer}" for answer, count in summary.counts.items())
            yield f"{summary.path:<20} {counts}"
            if summary.answer in ("bug", "cannot judge"):
                yield f"  first: {summary.first}"
        if self.shard:
            held, all_units = len(self.shard["units"]), self.shard["all_units"]
            yield f"shard {self.shard['group']} of {self.shard['splits']}: {held} of {all_units} units"
        if self.left_out:
            yield f"left out for the budget, which the rest was expected to fill for {self.seconds:.0f} s:"
        for unit in self.left_out[:shown]:
            lost = f"; only it kills {', '.join(unit['lost'])}" if unit.get("lost") else ""
            yield f"  {unit['name']} ({unit['seconds']:.1f} s{lost})"
        if len(self.left_out) > shown:
            yield f"  and {len(self.left_out) - shown} more"
        if self.not_run:
            yield f"not run: {self.not_run} planned stages; they are recorded as not compared"
        if self.out:
            yield f"records: {self.out}"


def gather(folder: Path, policy: str, interrupted: bool, out: str | None, crashed: Collection[str]) -> Gathered:
    """Joins and judges the workers' records below `folder`; with `out`, writes records.jsonl and run.json there.

    `crashed` names the units that a worker was at when it died.
    """
    raw = json.loads((folder / FACTS).read_text())[0] if (folder / FACTS).is_file() else {}
    facts = {**raw, "left_out": [*raw.get("left_out", []), *_left_late(folder / LEFT)]}
    seconds = facts.pop("expected_seconds", 0.0)
    late = {unit["name"] for unit in facts["left_out"]}
    records = unique(_all_records(folder))
    planned = read_planned(folder / PLANNED)
    records += _killed_records(folder, planned, records)
    planned = [item for item in planned if f"{item.case}-layer{item.layer}" not in late]
    lost = list(missing(planned, records, dict.fromkeys(crashed, "its worker died")))
    verdicts = judge([*records, *lost], load_policy(policy))
    if out:
        _rewrite(folder, [*records, *lost])
        RunDir.open(folder).write_manifest(
            status="interrupted" if interrupted else "complete",
            policy=policy,
            verdicts=[verdict.to_json() for verdict in verdicts],
            not_run=len(lost),
            **facts,
        )
    return Gathered(verdicts, facts["left_out"], len(lost), seconds, out, facts.get("shard"))


def _killed_records(folder: Path, planned: list[Planned], records: list[Record]) -> list[Record]:
    """A crash for every path at which a worker died and that no later worker has accounted for."""
    known = {(record.case, record.layer, record.path) for record in records}
    kinds = {(item.case, item.layer): item.kind for item in planned}
    return [
        killed_record(case, layer, kinds[case, layer], path)
        for case, layer, path in sorted(killed(folder) - known)
        if (case, layer) in kinds
    ]


def _left_late(file: Path) -> list[dict[str, Any]]:
    """Units left out because the budget was spent when their turn came, each once."""
    lines = file.read_text().splitlines() if file.is_file() else []
    return list({unit["name"]: unit for unit in map(json.loads, lines)}.values())


def _all_records(folder: Path) -> list[Record]:
    files = [folder / RECORDS, *sorted(folder.glob(PARTS))]
    return [record for file in files if file.is_file() for record in read_records(file)]


def _rewrite(out: Path, records: list[Record]) -> None:
    """Replaces records.jsonl by `records`, then drops the workers' files; a torn end never loses what they hold."""
    part = out / f"{RECORDS}.part"
    part.unlink(missing_ok=True)
    append_records(part, records)
    part.replace(out / RECORDS)
    notes = [*out.glob("running-*.json"), *out.glob("memory-*"), out / PLANNED, out / FACTS, out / LEFT]
    for leftover in [*out.glob(PARTS), *notes]:
        leftover.unlink(missing_ok=True)
