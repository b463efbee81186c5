"""What a sweep leaves beside its records: curves as CSV and as Markdown, the conclusion, pictures."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from .conclusion import conclusion
from .curves import Curve
from .sweep import SweepOutcome
from .sweep_cell import FILE
from .sweep_plot import NoMatplotlib, draw

COLUMNS = ("distractor", "index_topk", "group", "variant", "length", "found", "asked", "chance", "exercised", "shape")


def write_outputs(outcome: SweepOutcome, folder: Path, formats: Sequence[str], errors: Console) -> list[Path]:
    """Writes everything that is computed from the records, anew each time. Returns the files, the records first."""
    written = [folder / FILE, folder / "curves.csv", folder / "conclusion.md", folder / "tables.md"]
    write_curves(outcome.curves, written[1])
    written[3].write_text("\n".join(markdown_tables(outcome.curves)) + "\n")
    written[2].write_text("\n".join(conclusion(outcome.curves, outcome.cells)) + "\n")
    try:
        written += draw(outcome.curves, outcome.cells, folder, formats)
    except NoMatplotlib as error:
        errors.print(str(error), markup=False, highlight=False, soft_wrap=True)
    return written


def write_curves(curves: Sequence[Curve], file: Path) -> None:
    """One line a point of a curve."""
    with file.open("w", newline="") as stream:
        rows = csv.writer(stream)
        rows.writerow(COLUMNS)
        for curve in curves:
            for point in curve.points:
                where = (curve.distractor, curve.k, curve.group, curve.variant, point.length)
                rows.writerow((*where, point.found, point.total, f"{point.chance:.4f}", point.exercised, curve.shape))


def markdown_tables(curves: Sequence[Curve]) -> list[str]:
    """Recall by length as Markdown, a table a distractor model and k, over the lengths that had to choose."""
    lines: list[str] = []
    for distractor, k in dict.fromkeys((curve.distractor, curve.k) for curve in curves):
        mine = [curve for curve in curves if (curve.distractor, curve.k) == (distractor, k) and curve.exercised]
        if not mine:
            continue
        points = max((curve.exercised for curve in mine), key=len)
        titles = [f"{point.length:,}" for point in points]
        lines += ["", f"**{distractor}, index_topk {k}**", ""]
        lines += [_row(["variant", *titles, "shape"]), _row(["---", *["---:"] * len(titles), "---"])]
        lines += [_row(["*at random*", *(f"*{point.chance:.2f}*" for point in points), ""])]
        for curve in mine:
            at = {point.length: f"{point.recall:.2f}" for point in curve.exercised}
            lines.append(_row([curve.variant, *(at.get(point.length, "") for point in points), curve.shape]))
    return lines[1:]


def _row(parts: Sequence[str]) -> str:
    return f"| {' | '.join(parts)} |"


def to_json(outcome: SweepOutcome, folder: Path) -> dict[str, Any]:
    """Verdicts and numbers for machines; the cells themselves are in the records file."""
    return {
        "directory": str(folder),
        "exit_code": outcome.exit_code,
        "seconds": outcome.seconds,
        "curves": [curve_json(curve) for curve in outcome.curves],
        "conclusion": conclusion(outcome.curves, outcome.cells),
    }


def curve_json(curve: Curve) -> dict[str, Any]:
    return {
        "distractor": curve.distractor,
        "variant": curve.variant,
        "group": curve.group,
        "index_topk": curve.k,
        "shape": curve.shape,
        "half": curve.half,
        "onset": curve.onset,
        "lift": [curve.lift, curve.lift_low, curve.lift_high],
        "lost": curve.lost,
        "unexplained": curve.unexplained,
        "margin_lost": curve.margin_lost,
        "error": curve.error,
        "recall": {str(point.length): [point.found, point.total] for point in curve.points},
    }
