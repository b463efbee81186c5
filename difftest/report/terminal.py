"""What a person reads after a run: the first divergence, one table a case, the verdicts, and the conclusion last."""

import re
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..record import Record
from ..session import Outcome
from ..stages import STAGES, StageName
from ..text import ranges
from ..verdict import SEVERITY, Verdict, first_divergence

QUALITY = (("topk", "recall", "recall"), ("attention", "relative_error", "attn error"))
Place = tuple[str, int, str, StageName | None]
STYLE = {"agrees": "green", "explained": "yellow", "bug": "bold red", "cannot judge": "magenta"}
SHORT = {"selection not exercised": "not exercised"}


def show(outcome: Outcome, console: Console, by_layer: bool = False) -> None:
    """Prints the whole outcome. Columns are paths (or path and layer), rows are stages.

    An isolated cell is `deviation / bound` of the layer nearest to its bound, `FAIL` where a check failed.
    """
    first = first_divergence(outcome.verdicts)
    if first:
        console.print(Text(f"first divergence: {first}", style="bold red"), soft_wrap=True)
        console.print()
    bad = {
        (verdict.case, verdict.layer, verdict.path, verdict.stage)
        for verdict in outcome.verdicts
        if verdict.answer == "bug"
    }
    for case in dict.fromkeys(record.case for record in outcome.records):
        mine = [record for record in outcome.records if record.case == case]
        layers = sorted({record.layer for record in mine})
        kinds = ", ".join(dict.fromkeys(record.kind for record in mine))
        title = f"{case}   {kinds} layer{'s' if len(layers) > 1 else ''} {ranges(layers)}"
        console.print(Text(title, style="bold"), soft_wrap=True)
        console.print(_table(mine, bad, by_layer))
        console.print()
    _verdicts(outcome.verdicts, console)
    for path, why in outcome.skipped_paths.items():
        console.print(f"not run: {path}: {why}", markup=False, highlight=False, soft_wrap=True)
    _conclusion(outcome, console)


def _table(records: list[Record], bad: set[Place], by_layer: bool) -> Table:
    table = Table(box=None, pad_edge=False)
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
        return Text(SHORT.get(worst.skipped, "skipped"), style="magenta")
    return Text(f"FAIL {_numbers(worst)}", style="bold red") if failed else Text(_numbers(worst), style="green")


def _numbers(record: Record) -> str:
    value, bound = record.metrics.get("deviation"), record.bounds.get("deviation")
    if value is None or bound is None:
        return record.findings[0].rule if record.findings else "ok"
    return f"{short(value)} / {short(bound)}"


def short(value: float) -> str:
    """Two significant digits in as few letters as they take: 2.5e-8, 0.0031, 280."""
    if 1 <= abs(value) < 1e5:
        return f"{value:.0f}" if value >= 10 or value == round(value) else f"{value:.1f}"
    return re.sub(r"e([+-])0*", lambda sign: "e" + sign.group(1).strip("+"), f"{value:.2g}")


def _accumulated(stage: str, metric: str, records: Iterable[Record]) -> str:
    values = [
        record.metrics[metric]
        for record in records
        if record.stage == stage and record.comparison == "accumulated" and metric in record.metrics
    ]
    if not values:
        return ""
    return f"{min(values):.4f}" if metric == "recall" else short(max(values))


def _verdicts(verdicts: list[Verdict], console: Console) -> None:
    """One line for each answer that a path's verdicts give, worst first, told by the first of them."""
    for path in dict.fromkeys(verdict.path for verdict in verdicts):
        mine = [verdict for verdict in verdicts if verdict.path == path]
        for answer in reversed(SEVERITY):
            some = [verdict for verdict in mine if verdict.answer == answer]
            if not some:
                continue
            line = Text(f"{path:<20} ") + Text(answer, style=STYLE[answer])
            line.append(f" in {len(some)} of {len(mine)}")
            if answer != "agrees":
                line.append(f", first {some[0].case} layer {some[0].layer}: {some[0].text.removeprefix(answer + ': ')}")
            console.print(line, soft_wrap=True)


def _conclusion(outcome: Outcome, console: Console) -> None:
    first = first_divergence(outcome.verdicts)
    if outcome.directory:
        console.print(f"records: {outcome.directory}", markup=False, highlight=False, soft_wrap=True)
    if outcome.status == "interrupted":
        console.print("interrupted: what is above was finished before", style="magenta")
    if first:
        paths = ", ".join(dict.fromkeys(verdict.path for verdict in outcome.verdicts if verdict.answer == "bug"))
        where = f"{first.path} at {first.case} layer {first.layer}, stage {first.stage}"
        console.print(f"DISAGREES: {paths}; first {where}", style="bold red", soft_wrap=True)
    elif outcome.exit_code:
        console.print(_why_not_zero(outcome), style="bold magenta", soft_wrap=True)
    else:
        costly = dict.fromkeys(verdict.path for verdict in outcome.verdicts if verdict.answer == "explained")
        rest = f"; the formats of {', '.join(costly)} miss the quality budget" if costly else ""
        console.print(f"AGREES: no stage of any path is outside its bound{rest}", style="bold green", soft_wrap=True)


def _why_not_zero(outcome: Outcome) -> str:
    if outcome.exit_code == 1:
        return "DISAGREES: a format costs more than the policy allows; see the verdicts above"
    if not outcome.records:
        return "CANNOT JUDGE: nothing was run"
    return "CANNOT JUDGE: see the verdicts above"
