"""Tables that are pictures: layer x stage for every path, and needles by length and depth. Text carries the meaning."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..record import Record
from ..stages import STAGES
from ..text import place
from ..verdict import failing
from .evidence import Evidence
from .properties import nearest_to_bound, share

SHADES = (0.01, 0.1, 0.3, 0.6, 1.0)
"""Shares of a bound at which the shade of a cell grows darker."""
ABSENT = "\N{EN DASH}"
SYMBOLS = {"ok": "✓", "bug": "✗", "skipped": "?", "none": ABSENT}
WORDS = {"ok": "within its bound", "bug": "outside its bound", "skipped": "not compared", "none": "does not exist"}
DEPTHS = 10
DETAILS = 40
"""Records that a cell lists when it is opened, those nearest to their bound first."""


@dataclass
class Cell:
    """One layer and stage of one path: its state, the share of the bound used, and what is listed when it is opened."""

    state: str = "none"
    share: float = 0.0
    records: list[Record] = field(default_factory=list)

    @property
    def symbol(self) -> str:
        return SYMBOLS[self.state]

    @property
    def words(self) -> str:
        return WORDS[self.state]

    @property
    def number(self) -> str:
        return "" if self.state in ("none", "skipped") else "∞" if math.isinf(self.share) else f"{self.share:.2g}"

    @property
    def shade(self) -> int:
        return sum(self.share > edge for edge in SHADES)


@dataclass
class Heatmap:
    """All layers and stages of one path."""

    path: str
    stages: list[str]
    layers: list[tuple[int, str, list[Cell]]]


def heatmaps(evidence: Evidence) -> list[Heatmap]:
    """One map a path, in the order in which paths first appear."""
    cells: dict[str, dict[tuple[int, str], Cell]] = {}
    kinds: dict[int, str] = {}
    for record in evidence.records:
        if record.comparison != "isolated":
            continue
        kinds[record.layer] = record.kind
        cell = cells.setdefault(record.path, {}).setdefault((record.layer, record.stage), Cell())
        _add(cell, record, failing(record, evidence.policy))
    made = []
    for path, by_place in cells.items():
        stages = [stage for stage in STAGES if any(where[1] == stage for where in by_place)]
        layers = sorted({where[0] for where in by_place})
        rows = [(layer, kinds[layer], [by_place.get((layer, stage), Cell()) for stage in stages]) for layer in layers]
        made.append(Heatmap(path, list(stages), rows))
    return made


def _add(cell: Cell, record: Record, failed: bool) -> None:
    cell.records.append(record)
    if failed:
        cell.state = "bug"
    elif cell.state != "bug":
        cell.state = "skipped" if record.skipped and cell.state != "ok" else "ok"
    cell.share = max(cell.share, share_of_bound(record))


def share_of_bound(record: Record) -> float:
    """How much of its bound a record uses; infinite for a broken rule."""
    if record.findings:
        return math.inf
    metric = nearest_to_bound(record)
    return share(record, metric) if metric else 0.0


def details(heatmap: Heatmap) -> dict[str, list[list[str]]]:
    """What each cell shows when it is opened, by `layer/stage`: case, metric, value, bound, and the worst element."""
    found = {}
    for layer, _, cells in heatmap.layers:
        for stage, cell in zip(heatmap.stages, cells, strict=True):
            ordered = sorted(cell.records, key=share_of_bound, reverse=True)
            if ordered:
                found[f"{layer}/{stage}"] = [_detail(record) for record in ordered[:DETAILS]]
    return found


def _detail(record: Record) -> list[str]:
    metric = nearest_to_bound(record)
    if record.findings:
        said = f"{record.findings[0].rule}: {record.findings[0].message}"
    elif record.skipped:
        said = f"not compared: {record.skipped}"
    elif record.worst:
        worst = record.worst
        said = f"{place(worst.where)}: got {worst.got:.6g}, exact {worst.want:.6g}, bound {worst.bound:.3g}"
    else:
        said = ""
    numbers = [f"{record.metrics[metric]:.4g}", f"{record.bounds[metric]:.4g}"] if metric else ["", ""]
    return [record.case, metric, *numbers, said]


@dataclass
class Grid:
    """Needles of one path (or server) by length and depth; each cell is (state, text)."""

    title: str
    depths: list[str]
    rows: list[tuple[str, list[tuple[str, str]]]]

    @property
    def lost(self) -> bool:
        """Whether any needle was not found."""
        return any(state in ("fail", "part") for _, cells in self.rows for state, _ in cells)


def needle_grids(evidence: Evidence) -> list[Grid]:
    """Grids of needle cases, of in-process sweeps and of live servers, those that lost needles first."""
    found: dict[str, dict[tuple[int, str], list[bool]]] = {}
    for record in evidence.records:
        if record.comparison == "accumulated" and record.path != "oracle":
            lengths = evidence.cases.get(record.case, {}).get("lengths", [0])
            for visible, depth, hit in record.facts.get("needles") or []:
                cell = found.setdefault(f"cases, {record.path}", {})
                cell.setdefault((max(max(lengths), visible), _depth(depth)), []).append(bool(hit))
    for needle in evidence.sweep:
        if needle.result is not None:
            cell = found.setdefault(f"sweep, {needle.variant}, k {needle.k}, {needle.distractor}", {})
            cell.setdefault((needle.length, _depth(needle.depth)), []).append(needle.result.selected)
    for (server, suite, length, depth), result in evidence.exchanges.items():
        if result in ("pass", "miss"):
            cell = found.setdefault(f"server {server}, {suite}", {})
            cell.setdefault((length, str(depth)), []).append(result == "pass")
    return sorted((_grid(title, cells) for title, cells in found.items()), key=lambda grid: not grid.lost)


def _depth(share: float) -> str:
    return f"{round(share * DEPTHS) / DEPTHS:.0%}"


def _grid(title: str, cells: dict[tuple[int, str], list[bool]]) -> Grid:
    depths = sorted({key[1] for key in cells}, key=_order)
    lengths = sorted({key[0] for key in cells})
    rows = [(f"{length:,}", [_needle(cells.get((length, depth), [])) for depth in depths]) for length in lengths]
    return Grid(title, depths, rows)


def _order(depth: str) -> tuple[float, str]:
    text = depth.rstrip("%")
    try:
        return float(text), depth
    except ValueError:
        return math.inf, depth


def _needle(hits: Sequence[bool]) -> tuple[str, str]:
    if not hits:
        return "none", ABSENT
    count = sum(hits)
    state = "pass" if count == len(hits) else "fail" if not count else "part"
    symbol = {"pass": "✓", "fail": "✗", "part": "±"}[state]
    return state, f"{symbol} {count}/{len(hits)}"
