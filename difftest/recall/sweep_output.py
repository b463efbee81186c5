"""What a sweep leaves beside its records: the curves as CSV, the conclusion as Markdown, pictures."""

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
    written = [folder / FILE, folder / "curves.csv", folder / "conclusion.md"]
    write_curves(outcome.curves, written[1])
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
