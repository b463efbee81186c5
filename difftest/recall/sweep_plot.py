"""Recall curves and the margins of lost needles as pictures. Needs matplotlib, the optional extra `plots`."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .curves import Curve, wilson
from .sweep_cell import Cell

INSTALL = 'pip install "difftest[plots]"'
SIZE = (9.0, 4.6)
"""Inches of a picture with one panel."""
MARKERS = "osD^vP*Xph<>"
BINS = 12
"""Margin bins of the loss picture, evenly spaced in log2 over SPAN."""
SPAN = (-6.0, 1.0)
MOST_LINES = 16
"""Curves of a picture; of more only those that lose needles are drawn, with one k."""
FEWEST = 8
"""Needles that a bin must hold to be drawn."""


class NoMatplotlib(Exception):
    """matplotlib cannot be imported; the message says how to install it."""


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise NoMatplotlib(f"no pictures: matplotlib is not installed; {INSTALL}") from error
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "difftest"
    matplotlib.rcParams["svg.fonttype"] = "none"
    from matplotlib import pyplot

    return pyplot


def draw(curves: Sequence[Curve], cells: Sequence[Cell], folder: Path, formats: Sequence[str]) -> list[Path]:
    """Draws everything the cells can show, in every format (`svg`, `png`). NoMatplotlib when there is none."""
    pyplot = _pyplot()
    written = []
    for distractor in dict.fromkeys(curve.distractor for curve in curves):
        for group in dict.fromkeys(curve.group for curve in curves):
            mine = [c for c in curves if c.distractor == distractor and c.group == group and c.points]
            if mine:
                drawn, title = _readable(mine, f"{group}s" if group == "path" else group)
                figure = recall_figure(pyplot, drawn, title, distractor)
                written += _save(pyplot, figure, folder / f"recall-{distractor}-{group}", formats)
    if any(cell.result and cell.result.margin is not None for cell in cells):
        figure = loss_figure(pyplot, cells)
        written += _save(pyplot, figure, folder / "loss-by-margin", formats)
    return written


def _readable(curves: Sequence[Curve], title: str) -> tuple[Sequence[Curve], str]:
    """The curves that a picture can show, and its title."""
    if len(curves) <= MOST_LINES:
        return curves, title
    first = min(curve.k for curve in curves)
    lossy = [curve for curve in curves if curve.k == first and curve.lost]
    rest = sum(curve.k == first for curve in curves) - len(lossy)
    return (lossy or curves[:1]), f"{title}, index_topk {first} ({rest} more lose nothing)"


def recall_figure(pyplot: Any, curves: Sequence[Curve], title: str, distractor: str) -> Any:
    """Recall against length, one line a variant and k, with what chance finds for each k."""
    figure, axis = pyplot.subplots(figsize=SIZE)
    axis.set_prop_cycle(color=pyplot.get_cmap("tab20").colors if len(curves) > 10 else pyplot.get_cmap("tab10").colors)
    many_k = len({curve.k for curve in curves}) > 1
    for place, curve in enumerate(curves):
        lengths = [point.length for point in curve.points]
        label = f"{curve.variant}, k {curve.k}" if many_k else curve.variant
        recall = [point.recall for point in curve.points]
        axis.plot(lengths, recall, marker=MARKERS[place % len(MARKERS)], markersize=4, linewidth=1.2, label=label)
    for k in sorted({curve.k for curve in curves}):
        points = next(curve.points for curve in curves if curve.k == k)
        chance = [point.chance for point in points]
        lengths = [point.length for point in points]
        axis.plot(lengths, chance, color="black", linestyle=":", linewidth=1, label=f"{k} entries at random")
    axis.axvline(4509, color="grey", linewidth=0.6, linestyle="--")
    axis.set_xscale("log")
    ticks = [point.length for point in curves[0].points]
    axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks], rotation=45, fontsize=7)
    axis.minorticks_off()
    axis.set_ylim(-0.03, 1.03)
    axis.set_xlabel("context length in tokens")
    axis.set_ylabel("needles selected")
    axis.set_title(f"{distractor}: {title}", fontsize=10)
    axis.legend(fontsize=6, loc="center left", bbox_to_anchor=(1.0, 0.5))
    axis.grid(alpha=0.2)
    return figure


def loss_figure(pyplot: Any, cells: Sequence[Cell]) -> Any:
    """Share of lost needles against their margin in units of each path's error bound, paths and formats together."""
    figure, axis = pyplot.subplots(figsize=SIZE)
    names = [c.variant for c in cells if c.group in ("path", "formats")] or [c.variant for c in cells]
    width = (SPAN[1] - SPAN[0]) / BINS
    for place, name in enumerate(dict.fromkeys(names)):
        bins: dict[int, list[bool]] = {}
        for cell in cells:
            if cell.variant == name and cell.result and cell.result.margin is not None and cell.result.margin > 0:
                at = math.floor((min(math.log2(cell.result.margin), SPAN[1] - width) - SPAN[0]) / width)
                bins.setdefault(max(0, at), []).append(not cell.result.selected)
        bins = {at: lost for at, lost in bins.items() if len(lost) >= FEWEST}
        middles = [2 ** (SPAN[0] + (at + 0.5) * width) for at in sorted(bins)]
        shares = [sum(bins[at]) / len(bins[at]) for at in sorted(bins)]
        errors = [wilson(sum(bins[at]), len(bins[at])) for at in sorted(bins)]
        low = [max(0.0, share - pair[0]) for share, pair in zip(shares, errors, strict=True)]
        high = [max(0.0, pair[1] - share) for share, pair in zip(shares, errors, strict=True)]
        style = MARKERS[place % len(MARKERS)]
        axis.errorbar(
            middles, shares, yerr=[low, high], marker=style, markersize=4, linewidth=1, elinewidth=0.5, label=name
        )
    axis.axvline(1.0, color="grey", linewidth=0.6, linestyle="--")
    axis.set_xscale("log", base=2)
    axis.set_ylim(-0.03, 1.03)
    axis.set_xlabel("exact score above the cut, in units of the variant's own error bound (last point: all above)")
    axis.set_ylabel("needles lost")
    axis.set_title("A needle can be lost only within the error bound of its format", fontsize=10)
    axis.legend(fontsize=6, loc="center left", bbox_to_anchor=(1.0, 0.5))
    axis.grid(alpha=0.2)
    return figure


def _save(pyplot: Any, figure: Any, stem: Path, formats: Sequence[str]) -> list[Path]:
    written = []
    for suffix in formats:
        file = stem.with_suffix(f".{suffix}")
        facts = {"Date": None} if suffix == "svg" else None
        figure.savefig(file, bbox_inches="tight", dpi=110, metadata=facts)
        written.append(file)
    pyplot.close(figure)
    return written
