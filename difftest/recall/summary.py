"""The summary of a live run for people: a grid of lengths and depths, the reasons, the conclusion last."""

from collections import Counter as Tally
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from .journal import Exchange
from .outcome import CellResult, Outcome, Row, suites_of

MARKS = {
    "pass": "[green]ok[/]",
    "miss": "[red]MISS[/]",
    "too long": "too long",
    "refused": "[yellow]refused[/]",
    "failed": "[yellow]failed[/]",
    "missing": "-",
}
SHOWN_REASONS = 12
"""Misses whose reason is printed; the journal has all of them."""


def _mark(cells: dict[str, dict[Row, CellResult]], row: Row) -> str:
    return " / ".join(MARKS[results[row].result] for results in cells.values() if row in results) or " "


def grid(outcome: Outcome, suite: str) -> Table:
    """One suite: a row a length, a column a depth; two servers share a cell as `A / B`."""
    first = next(iter(outcome.cells.values()))
    rows = [row for row in first if row[0] == suite]
    depths = list(dict.fromkeys(row[2] for row in rows))
    table = Table(title=suite, title_justify="left", box=None, pad_edge=False)
    for title in ("length", "prompt", *depths, "seconds"):
        table.add_column(title, justify="right" if title in ("length", "prompt", "seconds") else "left")
    for length in sorted({row[1] for row in rows}):
        asked = [results[row] for results in outcome.cells.values() for row in rows if row[1] == length]
        marks = [_mark(outcome.cells, (suite, length, depth)) for depth in depths]
        prompt = max((result.prompt for result in asked), default=0)
        seconds = max((result.seconds for result in asked), default=0.0)
        table.add_row(f"{length:,}", f"{prompt:,}" if prompt else "?", *marks, f"{seconds:.1f}")
    return table


def reasons(outcome: Outcome) -> list[str]:
    """`server suite/length/depth: why` of every cell that is no pass."""
    return [
        f"{server} {row[0]}/{row[1]}/{row[2]}: {result.result}: {result.why}"
        for server, results in outcome.cells.items()
        for row, result in results.items()
        if result.result not in ("pass", "missing")
    ]


def retries(exchanges: Sequence[Exchange]) -> str:
    """One line on attempts: how many failed, of which kind."""
    attempts = [attempt for exchange in exchanges for attempt in exchange.attempts]
    failed = Tally(attempt.outcome for attempt in attempts if attempt.outcome != "ok")
    kinds = ", ".join(f"{count} {kind}" for kind, count in failed.most_common()) or "none failed"
    return f"{len(exchanges)} exchanges in {len(attempts)} attempts: {kinds}"


def show(outcome: Outcome, exchanges: Sequence[Exchange], console: Console) -> None:
    """Prints grids, reasons, attempts and the conclusion."""
    for suite in suites_of(next(iter(outcome.cells.values()))):
        console.print(grid(outcome, suite))
        console.print()
    why = reasons(outcome)
    for line in why[:SHOWN_REASONS]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if len(why) > SHOWN_REASONS:
        console.print(f"... and {len(why) - SHOWN_REASONS} more in the journal", highlight=False)
    console.print(retries(exchanges), highlight=False)
    for line in outcome.conclusion:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
