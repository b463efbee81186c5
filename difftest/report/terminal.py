"""What a person reads after a run: one table a case, the verdicts, what was not run, and the conclusion last."""

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..record import Record
from ..session import Outcome
from ..stages import STAGES, StageName
from ..verdict import Verdict

QUALITY = (("topk", "recall", "recall"), ("attention", "relative_error", "attention error"))
Place = tuple[str, int, str, StageName | None]
STYLE = {"agrees": "green", "explained": "yellow", "bug": "bold red", "cannot judge": "magenta"}


def show(outcome: Outcome, console: Console, by_layer: bool = False) -> None:
    """Prints the whole outcome. Columns are paths (or path and layer), rows are stages.

    An isolated cell is `deviation / bound` of the layer nearest to its bound, `FAIL` where a check failed.
    """
    bad = {
        (verdict.case, verdict.layer, verdict.path, verdict.stage)
        for verdict in outcome.verdicts
        if verdict.answer == "bug"
    }
    for case in dict.fromkeys(record.case for record in outcome.records):
        console.print(_table(case, [record for record in outcome.records if record.case == case], bad, by_layer))
        console.print()
    _verdicts(outcome.verdicts, console)
    for path, why in outcome.skipped_paths.items():
        console.print(f"not run: {path}: {why}", markup=False, highlight=False, soft_wrap=True)
    _conclusion(outcome, console)


def _table(case: str, records: list[Record], bad: set[Place], by_layer: bool) -> Table:
    layers = sorted({record.layer for record in records})
    kinds = ", ".join(dict.fromkeys(record.kind for record in records))
    table = Table(
        title=f"{case}   {kinds} layer{'s' if len(layers) > 1 else ''} {', '.join(map(str, layers))}",
        title_justify="left",
        title_style="bold",
        box=None,
        pad_edge=False,
    )
    columns = list(dict.fromkeys((record.path, record.layer if by_layer else -1) for record in records))
    table.add_column("stage")
    for path, layer in columns:
        table.add_column(f"{path} {layer}" if by_layer else path, justify="right", overflow="fold")
    chosen = {column: [r for r in records if r.path == column[0] and column[1] in (-1, r.layer)] for column in columns}
    for stage in STAGES:
        if any(record.stage == stage for record in records):
            table.add_row(stage, *(_isolated(stage, chosen[column], bad) for column in columns))
    for measured, metric, label in QUALITY:
        cells = [_accumulated(measured, metric, chosen[column]) for column in columns]
        if any(cells):
            table.add_row(Text(label, style="italic"), *cells)
    return table


def _isolated(stage: StageName, records: Iterable[Record], bad: set[Place]) -> Text:
    found = [record for record in records if record.stage == stage and record.comparison == "isolated"]
    if not found:
        return Text("-", style="dim")
    failed = next((record for record in found if (record.case, record.layer, record.path, stage) in bad), None)
    worst = failed or max(found, key=lambda record: record.metrics.get("excess", 0.0))
    if worst.skipped and not failed:
        return Text("not exercised" if worst.skipped == "selection not exercised" else "skipped", style="magenta")
    numbers = _numbers(worst)
    return Text(f"FAIL {numbers}", style="bold red") if failed else Text(numbers, style="green")


def _numbers(record: Record) -> str:
    value, bound = record.metrics.get("deviation"), record.bounds.get("deviation")
    if value is None or bound is None:
        return record.findings[0].rule if record.findings else "ok"
    return f"{value:.2g} / {bound:.2g}"


def _accumulated(stage: str, metric: str, records: Iterable[Record]) -> str:
    values = [
        record.metrics[metric]
        for record in records
        if record.stage == stage and record.comparison == "accumulated" and metric in record.metrics
    ]
    if not values:
        return ""
    return f"{min(values):.4f}" if metric == "recall" else f"{max(values):.2e}"


def _verdicts(verdicts: list[Verdict], console: Console) -> None:
    """One line a path where its verdicts are alike, and one line each where they are not."""
    for path in dict.fromkeys(verdict.path for verdict in verdicts):
        mine = [verdict for verdict in verdicts if verdict.path == path]
        for answer in ("bug", "cannot judge", "explained", "agrees"):
            some = [verdict for verdict in mine if verdict.answer == answer]
            if not some:
                continue
            line = Text(f"{path:<20} ") + Text(f"{answer} ", style=STYLE[answer])
            line.append(f"in {len(some)} of {len(mine)}")
            if answer != "agrees":
                line.append(f"; {some[0].case} layer {some[0].layer}: {some[0].text}")
            console.print(line, soft_wrap=True)


def _conclusion(outcome: Outcome, console: Console) -> None:
    bugs = [verdict for verdict in outcome.verdicts if verdict.answer == "bug"]
    if outcome.directory:
        console.print(f"records: {outcome.directory}", markup=False, highlight=False, soft_wrap=True)
    if outcome.status == "interrupted":
        console.print("interrupted: what is above was finished before", style="magenta")
    if bugs:
        paths = ", ".join(dict.fromkeys(verdict.path for verdict in bugs))
        first = f"first at {bugs[0].case} layer {bugs[0].layer}, stage {bugs[0].stage}"
        console.print(f"DISAGREES: {paths}; {first}", style="bold red", soft_wrap=True)
    elif outcome.exit_code:
        console.print("CANNOT JUDGE: see the lines above", style="bold magenta")
    else:
        console.print("AGREES: no stage of any path is outside its bound", style="bold green")
