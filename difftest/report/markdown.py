"""The Markdown of a job summary: ten lines when green; when red what diverged first, by how much, and how to see it."""

import math
from collections.abc import Collection, Iterator
from typing import Any

from ..record import Record
from ..text import place
from ..verdict import Verdict, failing
from .evidence import Evidence
from .grids import share_of_bound

MOVED = 8
"""Metrics of a comparison with the base that are listed."""
FIRSTS = 5
"""Failing verdicts that are listed beyond the first."""


def markdown(evidence: Evidence) -> str:
    """The summary, the conclusion first."""
    lines = [f"### {_mark(evidence)} difftest: {evidence.answer.lower()}", "", conclusion(evidence), ""]
    lines += ["| path | verdicts | recall, worst |", "| --- | --- | --- |"]
    lines += [_row(path, counts, _recall(evidence, path)) for path, counts in _paths(evidence)]
    if evidence.first:
        lines += ["", *_divergence(evidence, evidence.first)]
    if evidence.problems:
        lines += ["", *(f"- {problem}" for problem in evidence.problems)]
    if evidence.baseline:
        lines += ["", *_against_base(evidence.baseline)]
    return "\n".join(lines) + "\n"


def _mark(evidence: Evidence) -> str:
    return {0: "✅", 1: "❌", 125: "⚠️"}[evidence.exit_code]


def conclusion(evidence: Evidence) -> str:
    """One sentence: what was compared and what came out."""
    cases, layers = ({getattr(v, name) for v in evidence.verdicts} for name in ("case", "layer"))
    counts = _counted(evidence.summaries, "path"), _counted(cases, "case"), _counted(layers, "layer")
    compared = "{} on {} and {}".format(*counts)
    if evidence.first:
        paths = list(dict.fromkeys(v.path for v in evidence.verdicts if v.answer == "bug"))
        first = evidence.first
        where = f"first divergence at {first.case} layer {first.layer}, stage {first.stage}"
        return f"{', '.join(paths)}: {where} ({compared})."
    if evidence.baseline and evidence.baseline.get("exit_code") == 1:
        return f"{evidence.baseline['sentence']} ({compared})."
    explained = [summary.path for summary in evidence.summaries if "explained" in summary.counts]
    formats = f"; the formats of {', '.join(explained)} cost more than the budget" if explained else ""
    if evidence.exit_code:
        why = evidence.problems or [str(verdict) for verdict in evidence.verdicts if verdict.exit_code == 125]
        if evidence.verdicts and not why and evidence.baseline:
            why = [f"against the base branch: {evidence.baseline['sentence']}"]
        return f"{why[0] if why else 'nothing was compared'} ({compared})."
    return f"No stage of any path is outside its bound{formats} ({compared})."


def _counted(things: Collection[object], noun: str) -> str:
    return f"{len(things)} {noun}{'' if len(things) == 1 else 's'}"


def _paths(evidence: Evidence) -> Iterator[tuple[str, dict[str, int]]]:
    yield from ((summary.path, summary.counts) for summary in evidence.summaries)


def _row(path: str, counts: dict[str, int], recall: str) -> str:
    said = ", ".join(f"{count} {answer}" for answer, count in counts.items())
    return f"| `{path}` | {said} | {recall} |"


def _recall(evidence: Evidence, path: str) -> str:
    found = [
        (record.metrics["recall"], record.metrics.get("recall_worst", math.nan))
        for record in evidence.records
        if record.path == path
        and record.stage == "topk"
        and record.comparison == "accumulated"
        and "recall" in record.metrics
    ]
    if not found:
        return ""
    return f"{sum(pair[0] for pair in found) / len(found):.4f}, {min(pair[1] for pair in found):.4f}"


def _divergence(evidence: Evidence, first: Verdict) -> Iterator[str]:
    """First divergence, worst offender, blame, the command, and the other bugs."""
    where = f"`{first.path}` in `{first.case}` layer {first.layer} ({first.kind}), stage `{first.stage}`"
    yield f"**First divergence**: {where}: {first.why}"
    yield ""
    worst = worst_offender(evidence)
    if worst is not None:
        yield f"**Worst offender**: {offence(worst)}"
        yield ""
    yield f"**Blame**: {blame(evidence, first)}"
    yield ""
    yield "**Run it again**:"
    yield ""
    yield f"    {run_again(first)}"
    others = [verdict for verdict in evidence.verdicts if verdict.answer == "bug" and verdict is not first]
    if others:
        yield ""
        yield f"{len(others)} more:"
        yield ""
        yield from (f"- `{v.path}` {v.case} layer {v.layer}: bug at {v.stage} ({v.rule})" for v in others[:FIRSTS])


def worst_offender(evidence: Evidence) -> Record | None:
    """The failing isolated record that is furthest beyond its bound; a broken rule is further than any number."""
    failed = [record for record in evidence.records if failing(record, evidence.policy)]
    return max(failed, key=share_of_bound, default=None)


def offence(record: Record) -> str:
    """Where a record is worst, with both values and the bound."""
    where = f"`{record.path}` {record.case} layer {record.layer} `{record.stage}`"
    if record.findings:
        return f"{where}: {record.findings[0].rule}: {record.findings[0].message}"
    if record.worst is None:
        return f"{where}: {share_of_bound(record):.3g} times its bound"
    worst = record.worst
    numbers = f"got {worst.got:.6g}, exact {worst.want:.6g}, bound {worst.bound:.3g}"
    return f"{where}, {place(worst.where)}: {numbers} ({share_of_bound(record):.3g} times the bound)"


def blame(evidence: Evidence, first: Verdict) -> str:
    """The stage to look at: the first that fails on inputs the path computed itself, and what verifies upstream."""
    mine = [
        record.stage
        for record in evidence.records
        if (record.case, record.layer, record.path, record.comparison)
        == (first.case, first.layer, first.path, "isolated")
        and not failing(record, evidence.policy)
        and not record.skipped
    ]
    passed = f"; {', '.join(mine)} compute what they declare" if mine else ""
    ask = f"difftest blame {first.case} --layer {first.layer} --path {first.path}"
    return f"`{first.stage}` itself, not its inputs{passed}. `{ask}` says what it costs downstream."


def run_again(verdict: Verdict) -> str:
    return f"difftest run --case {verdict.case} --layer {verdict.layer} --path {verdict.path}"


def _against_base(baseline: dict[str, Any]) -> Iterator[str]:
    yield f"**Against the base branch**: {baseline['sentence']}"
    rows = moved_rows(baseline)
    if rows:
        yield ""
        yield "| metric | base | head | difference | p adjusted | answer |"
        yield "| --- | --- | --- | --- | --- | --- |"
        yield from ("| " + " | ".join(row) + " |" for row in rows)


def moved_rows(baseline: dict[str, Any]) -> list[tuple[str, ...]]:
    """What moved most clearly against the base: metric, base, head, difference, p, answer."""
    order = ("worse", "too few seeds", "better", "moved")
    moved = [row for row in baseline.get("rows", []) if row["answer"] in order]
    moved.sort(key=lambda row: (order.index(row["answer"]), row["adjusted"]))
    return [
        (
            "{case} layer {layer} {path} {stage} {metric}".format(**row["key"]),
            *(f"{row[name]:.6g}" for name in ("base", "head")),
            f"{row['mean']:+.3g}",
            f"{row['adjusted']:.2g}",
            row["answer"],
        )
        for row in moved[:MOVED]
    ]
