"""All that a report is made of, read from one or several result directories. Imports no torch: reports are quick."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..record import Record
from ..run_dir import MANIFEST, RunDir
from ..scale.accounts import seeded, unique
from ..verdict import Policy, Summary, Verdict, first_divergence, judge, load_policy, overall

if TYPE_CHECKING:
    from ..recall.sweep_cell import Cell

SWEEP, EXCHANGES, BASELINE = "sweep.jsonl", "exchanges.jsonl", "baseline-result.json"


@dataclass
class Evidence:
    """Records of all runs with what one policy says of them, and the other results found beside them.

    bench      the JSON of `difftest bench`.   baseline  the JSON of `difftest baseline compare`.
    exchanges  (server, suite, length, depth) of a live run to its result ("pass", "miss", ...).
    problems   what is missing or interrupted; a report with problems is not green.
    """

    policy: Policy
    folders: list[Path] = field(default_factory=list)
    manifests: list[dict[str, Any]] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    sweep: "list[Cell]" = field(default_factory=list)
    exchanges: dict[tuple[str, str, int, str], str] = field(default_factory=dict)
    bench: dict[str, Any] | None = None
    baseline: dict[str, Any] | None = None
    problems: list[str] = field(default_factory=list)

    @cached_property
    def verdicts(self) -> list[Verdict]:
        return judge(self.records, self.policy)

    @cached_property
    def summaries(self) -> list[Summary]:
        return overall(self.verdicts)

    @cached_property
    def first(self) -> Verdict | None:
        """The first divergence: the bug of the earliest layer and stage."""
        return first_divergence(self.verdicts)

    @cached_property
    def cases(self) -> dict[str, dict[str, Any]]:
        """Recipes by case id, from all manifests."""
        return {name: case for manifest in self.manifests for name, case in (manifest.get("cases") or {}).items()}

    @property
    def exit_code(self) -> int:
        """0 agrees, 1 something disagrees or got worse, 125 nothing was judged or something is missing."""
        codes = {verdict.exit_code for verdict in self.verdicts}
        if self.baseline:
            codes.add(self.baseline["exit_code"])
        if 1 in codes:
            return 1
        return 125 if 125 in codes or self.problems or not self.verdicts else 0

    @property
    def answer(self) -> str:
        """The conclusion in capitals, as `difftest run` prints it."""
        return {0: "AGREES", 1: "DISAGREES", 125: "CANNOT JUDGE"}[self.exit_code]


def load(folders: Sequence[Path], policy: str) -> Evidence:
    """Reads result directories, or directories of runs. ValueError names one without a result, or a file's fault."""
    evidence = Evidence(load_policy(policy))
    for folder in folders:
        found = [read(evidence, folder) for read in READERS]
        if not any(found):
            found = [_read_run(evidence, file.parent) for file in sorted(folder.rglob(MANIFEST))]
        if not any(found):
            raise ValueError(f"{folder} holds no result: give the --out of difftest run, recall, bench or baseline")
        evidence.folders.append(folder)
    evidence.records = unique(evidence.records)
    return evidence


def _read_run(evidence: Evidence, folder: Path) -> bool:
    if not (folder / MANIFEST).is_file():
        return False
    run = RunDir.open(folder)
    evidence.manifests.append(run.manifest)
    evidence.records += seeded(run.records(), run.manifest.get("cases") or {})
    if run.manifest["status"] != "complete":
        evidence.problems.append(f"{folder.name} is {run.manifest['status']}: it holds what was finished before")
    evidence.problems += [f"not run: {path}: {why}" for path, why in _demanded(run.manifest)]
    evidence.problems += list(run.manifest.get("problems") or [])
    if run.manifest.get("not_run"):
        evidence.problems.append(f"{run.manifest['not_run']} planned stages of {folder.name} were never run")
    return True


def _demanded(manifest: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Paths that could not run although nothing else ran in their place."""
    skipped = manifest.get("skipped_paths") or {}
    if len(skipped) == len(manifest.get("paths") or [None]):
        yield from skipped.items()


def _read_sweep(evidence: Evidence, folder: Path) -> bool:
    if not (folder / SWEEP).is_file():
        return False
    from ..recall.sweep_cell import read_file

    evidence.sweep += read_file(folder / SWEEP)[1]
    return True


def _read_exchanges(evidence: Evidence, folder: Path) -> bool:
    if not (folder / EXCHANGES).is_file():
        return False
    from ..recall.journal import Exchange, read_lines
    from ..recall.outcome import cell_result

    turns: dict[tuple[str, str, int, str], list[Exchange]] = {}
    for raw in read_lines(folder / EXCHANGES):
        if raw.pop("kind") == "exchange":
            turn = Exchange.from_dict(raw)
            turns.setdefault((turn.server, turn.suite, turn.length, turn.depth), []).append(turn)
    for key, played in turns.items():
        evidence.exchanges[key] = cell_result(sorted(played, key=lambda turn: turn.turn), len(played)).result
    return True


def _read_json(evidence: Evidence, folder: Path) -> bool:
    """Results of one JSON file each: a bench and a comparison with a base."""
    files = [folder] if folder.is_file() else sorted(folder.glob("*.json"))
    found = False
    for file in files:
        if file.name == MANIFEST:
            continue
        try:
            raw = json.loads(file.read_text())
        except ValueError:
            continue
        if isinstance(raw, dict) and "ceilings" in raw and "rows" in raw:
            evidence.bench, found = raw, True
        elif isinstance(raw, dict) and {"sentence", "comparison", "exit_code"} <= set(raw):
            evidence.baseline, found = raw, True
    return found


READERS: tuple[Callable[[Evidence, Path], bool], ...] = (_read_run, _read_sweep, _read_exchanges, _read_json)
