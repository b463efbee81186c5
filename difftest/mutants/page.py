"""The page `docs/mutants.md`: what the matrix says, as a table."""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path as File

from ..stages import STAGES
from .gates import CALC_DIFF_LIMIT, RECALL_SHARE
from .matrix import Row
from .registry import NOT_EMULATED, PATHS, mutants

PAGE = File(__file__).parents[2] / "docs" / "mutants.md"

HEAD = """# Mutants: proof that the gates can fail

A mutant is a path with one fault in it. There is at least one for each kind of public bug report that can be emulated
on a CPU, planted by wrapping a single building block of the path (`difftest/mutants/`). Every gate is asked whether it
catches it. The rows are kept in `cases/kill_matrix.json`; `make mutants` makes them and this page again, and a test
fails when a gate no longer catches what it caught or when another stage is named.

Where the inside of a fused kernel is at fault (`bf16-k` has one each for keys, queries and scores), the kernel is
replaced by the same arithmetic in torch with the fault in it. Without a fault these stand-ins agree, as a test shows.
Faults of what a kernel is called with (tables, lengths, slots, weights) are planted in the call.

    difftest mutants list                                   every mutant, its report and its stage
    difftest mutants run l8-step-visibility --path bf16-k   what the gates say about one
    difftest run --path mutant:of=bf16-k,name=l8-step-visibility --case gaussian-2117
    difftest mutants matrix --check                         all of them against the kept rows

The other half is that nothing else fails. `make soak` runs 1,000 clean seeds, each another small case (families, modes,
lengths, layer kinds), through the eight CPU paths: of 8,000 judged layers none got the verdict `bug`. On two cores it
takes about 14 minutes (40 seeds in 32 s).

"""

COLUMNS = """## Every mutant

*stage*: where the fault sits; `difftest` names the same stage unless another is given in brackets. *caught by*: gates
of this tool that fail with the fault and pass without it, by stage, the stage at fault first. *calc_diff*: DeepGEMM's
measure, 1 - 2<x,y> / (<x,x> + <y,y>), of that stage's output against the faultless path's, and of the index scores
against fp64; **bold** where it reaches 1e-3 and the usual test would have failed. *recall*: mean recall@k against fp64;
**bold** where it falls below 99% of the faultless path's. *blame*: what `difftest blame` answers, and the stage with
the largest share of the loss.
"""


INDEX_STAGES = ("compressed", "index_k", "index_q", "head_weight", "score", "topk")


def write(rows: Sequence[Row], file: File = PAGE) -> None:
    """Writes the page for these rows."""
    file.write_text(text(rows))


def text(rows: Sequence[Row]) -> str:
    """The page as Markdown."""
    tables = [line for path in PATHS for line in ("", f"### {path}", "", *_table([r for r in rows if r.path == path]))]
    return "\n".join([HEAD.rstrip(), "", *_numbers(rows), "", *_gates(rows), "", COLUMNS.rstrip(), *tables, ""])


def _numbers(rows: Sequence[Row]) -> list[str]:
    """The summary: killed, named right, and what the field's two gates would have seen."""
    lines = ["## In numbers", "", "| | " + " | ".join(PATHS) + " |", "|---" * (1 + len(PATHS)) + "|"]

    def line(what: str, test: Callable[[Row], bool]) -> str:
        cells = []
        for path in PATHS:
            mine = [row for row in rows if row.path == path]
            cells.append(f"{sum(test(row) for row in mine)} of {len(mine)}")
        return f"| {what} | " + " | ".join(cells) + " |"

    lines += [
        line("caught by at least one gate", lambda row: row.killed),
        line("caught by an isolated check", lambda row: any(" isolated " in gate for gate in row.killed_by)),
        line("stage named is the stage at fault", lambda row: row.named_right),
        line("`difftest blame` answers `bug at` that stage", lambda row: f"bug at {row.stage_seeded}" in row.blame),
        line("and gives it the largest share of the loss", _blamed_right),
        line(f"`calc_diff` >= {CALC_DIFF_LIMIT:g} on that stage's output", lambda row: row.calc_diff_would),
        line(f"`calc_diff` >= {CALC_DIFF_LIMIT:g} on the index scores", lambda row: row.calc_diff_score_would),
        line(f"recall below {100 * RECALL_SHARE:g}% of the faultless path's", lambda row: row.recall_would),
        line("seen by neither `calc_diff` of the scores nor recall", _unseen),
        line("of these, faults of the index itself", lambda row: _unseen(row) and row.stage_seeded in INDEX_STAGES),
    ]
    kinds = {mutant.report for mutant in mutants().values()}
    lines += ["", f"{len(mutants())} mutants of {len(kinds)} kinds."]
    lines += [
        "A fault that costs less than the path's own number format has a smaller share of the loss than the format,",
        "and still fails its stage's check: that is the difference between a fault and its price.",
    ]
    lines += ["", "Not emulated:", ""]
    return [*lines, *(f"* {codes}: {why}" for codes, why in NOT_EMULATED.items())]


def _unseen(row: Row) -> bool:
    return not row.calc_diff_score_would and not row.recall_would


def _blamed_right(row: Row) -> bool:
    """Whether the stage with the largest share is the one at fault; the check's word where there is no share."""
    told = row.blame.rpartition("; ")
    return told[2].split(" ")[0] == row.stage_seeded if told[1] else f"bug at {row.stage_seeded}" in row.blame


def _gates(rows: Sequence[Row]) -> list[str]:
    caught = Counter(gate for row in rows for gate in row.killed_by)
    alone = Counter(row.killed_by[0] for row in rows if len(row.killed_by) == 1)
    lines = ["## Every gate", ""]
    lines += ["`isolated` checks a stage alone; `accumulated` and `budget` look at the chained result.", ""]
    lines += ["| gate | mutants caught | caught by it alone |", "|---|---|---|"]
    order = list(STAGES)
    for gate in sorted(caught, key=lambda name: (order.index(name.split(" ")[0]), name)):  # type: ignore[arg-type]
        lines.append(f"| {gate} | {caught[gate]} | {alone[gate] or ''} |")
    return lines


def _table(rows: Sequence[Row]) -> list[str]:
    lines = ["| mutant | stage | says | caught by | calc_diff: stage, scores | recall | blame |", "|---" * 7 + "|"]
    says = {name: mutant.says for name, mutant in mutants().items()}
    for row in rows:
        named = "" if row.named_right else f" ({row.stage_named or 'none'})"
        gates = _caught_by(row) or "**nothing**"
        diffs = f"{_bold(row.calc_diff, row.calc_diff_would)}, {_bold(row.calc_diff_score, row.calc_diff_score_would)}"
        cells = (row.mutant, row.stage_seeded + named, says.get(row.mutant, ""), gates, diffs)
        lines.append("| " + " | ".join([*cells, _bold(row.recall, row.recall_would), row.blame]) + " |")
    return lines


def _caught_by(row: Row) -> str:
    """Gates by stage, the stage at fault first: "topk: count, range; attention: relative_error"."""
    by_stage: dict[str, list[str]] = {row.stage_seeded: []}
    for gate in row.killed_by:
        stage, _, rule = gate.split(" ", 2)
        by_stage.setdefault(stage, []).append(rule)
    return "; ".join(f"{stage}: {', '.join(rules)}" for stage, rules in by_stage.items() if rules)


def _bold(value: float, bold: bool) -> str:
    return f"**{value:.3g}**" if bold else f"{value:.3g}"
