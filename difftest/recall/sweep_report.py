"""A sweep in the terminal: the pass/fail grid of length x depth x variant, and the conclusion under it."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .conclusion import round_length
from .sweep_cell import Cell

NARROW = 120
"""Columns of a terminal below which lengths are shown in thousands."""
ALL = "all"
"""Shown where every entry is selected: nothing can be lost there, so nothing is shown by it."""

LEGEND = """margin: exact score of the needle above the cut, in units of the declared error bound; lost up to: largest
margin of a lost needle; moved: mean relative change of the attention output by the variant's selection"""


def depth_name(depth: float, depths: Sequence[float]) -> str:
    """start, middle and end for three depths, else the share."""
    names = ("start", "middle", "end")
    ordered = sorted(depths)
    return names[ordered.index(depth)] if len(ordered) == len(names) else f"{depth:.2f}"


def show_grid(cells: Sequence[Cell], console: Console) -> None:
    """One grid a distractor model and k: found / asked over layers and seeds."""
    for distractor in dict.fromkeys(cell.distractor for cell in cells):
        for k in sorted({cell.k for cell in cells}):
            mine = [cell for cell in cells if cell.distractor == distractor and cell.k == k]
            if mine:
                short = console.width < NARROW
                console.print(grid(mine, f"{distractor}, index_topk {k}: needles found", short))
                console.print()


def grid(cells: Sequence[Cell], title: str, short: bool = False) -> Table:
    """Rows: variants and depths; columns: lengths, in thousands if `short`."""
    lengths, depths = sorted({cell.length for cell in cells}), sorted({cell.depth for cell in cells})
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("variant", no_wrap=True)
    table.add_column("depth", no_wrap=True)
    for length in lengths:
        table.add_column(round_length(length) if short else f"{length:,}", justify="right", no_wrap=True)
    at: dict[tuple[str, float, int], list[Cell]] = {}
    for cell in cells:
        at.setdefault((cell.variant, cell.depth, cell.length), []).append(cell)
    for variant in dict.fromkeys(cell.variant for cell in cells):
        for depth in depths:
            name = variant if depth == depths[0] else ""
            row = [mark(at.get((variant, depth, length), [])) for length in lengths]
            table.add_row(name, depth_name(depth, depths), *row)
    return table


def mark(cells: Sequence[Cell]) -> Text:
    """`9/9` green when all were found, red when fewer than half, yellow between; `all` where nothing can be lost."""
    if not cells:
        return Text("-", "dim")
    if any(cell.result is None for cell in cells):
        return Text("crash", "red")
    cells = [cell for cell in cells if not cell.below]
    if not cells:
        return Text("below", "dim")
    found, total = sum(bool(cell.result and cell.result.selected) for cell in cells), len(cells)
    if not any(cell.exercised for cell in cells) and found == total:
        return Text(ALL, "dim")
    return Text(f"{found}/{total}", "green" if found == total else "red" if 2 * found < total else "yellow")


def show_summary(cells: Sequence[Cell], console: Console) -> None:
    """One table a distractor model and k, a line a variant, over the rows that had to choose."""
    by: dict[tuple[str, int], dict[str, list[Cell]]] = {}
    for cell in cells:
        if cell.exercised and cell.result and not cell.below:
            by.setdefault((cell.distractor, cell.k), {}).setdefault(cell.variant, []).append(cell)
    for (distractor, k), variants in by.items():
        table = Table(title=f"{distractor}, index_topk {k}: rows that had to choose", title_justify="left", box=None)
        table.add_column("variant", no_wrap=True)
        for title in ("found", "worst rank", "least margin", "lost up to", "moved"):
            table.add_column(title, justify="right")
        for variant, found in variants.items():
            table.add_row(variant, *_summary(found))
        console.print(table)
    if by:
        console.print(LEGEND, style="dim", highlight=False)


def _summary(cells: Sequence[Cell]) -> tuple[str, ...]:
    results = [cell.result for cell in cells if cell.result]
    kept = [result for result in results if result.selected]
    lost = [result for result in results if not result.selected]
    ranks = [result.rank for result in results]
    margins = [result.margin for result in results if result.margin is not None]
    lost_margins = [result.margin for result in lost if result.margin is not None]
    worst = "NaN" if None in ranks else str(max(rank for rank in ranks if rank))
    return (
        f"{len(kept)}/{len(results)}",
        worst,
        f"{min(margins):.3g}",
        f"{max(lost_margins):.3g}" if lost_margins else "",
        f"{sum(result.moved for result in results) / len(results):.1%}",
    )
