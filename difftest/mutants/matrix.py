"""The kill matrix: which gate catches which mutant, kept in `cases/kill_matrix.json` and checked by the tests."""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path as File

from ..policy import Policy, load_policy
from ..verdict import judge
from .bench import Bench, Comparison
from .gates import CALC_DIFF_LIMIT, RECALL_SHARE, exercised_recall, gates, stage_calc_diff
from .mutant import Mutant
from .registry import PATHS, mutants

SCHEMA = 1
MATRIX = File(__file__).parents[2] / "cases" / "kill_matrix.json"
DIGITS = 3
"""Significant digits kept of a measured number: enough to read, few enough to be the same on every machine."""


@dataclass(frozen=True)
class Row:
    """One mutant in one path.

    stage_named      where the verdict says the fault is; empty if no isolated check failed.
    killed_by        every gate that catches it and passes the faultless path.
    calc_diff        DeepGEMM's measure of the stage's output against the faultless path's; `calc_diff_would`: at least
                     1e-3, or not comparable.
    calc_diff_score  the same of the index scores, an index path's output, against fp64; `calc_diff_score_would`: at
                     least 1e-3, which the faultless path keeps below.
    recall           mean recall@k against fp64; `recall_would`: below 0.99 of the faultless path's.
    blame            what `difftest blame` says: its answer, and the stage with the largest share of which consequence.
    """

    mutant: str
    path: str
    report: str
    case: str
    stage_seeded: str
    stage_named: str
    killed_by: tuple[str, ...]
    calc_diff: float
    calc_diff_would: bool
    calc_diff_score: float
    calc_diff_score_would: bool
    recall: float
    recall_would: bool
    blame: str = ""

    @property
    def killed(self) -> bool:
        return bool(self.killed_by)

    @property
    def named_right(self) -> bool:
        return self.stage_named == self.stage_seeded


def pairs(names: Sequence[str] = (), paths: Sequence[str] = PATHS) -> list[tuple[Mutant, str]]:
    """Mutant and path of every row, in stage order."""
    chosen = [mutant for name, mutant in mutants().items() if not names or name in names]
    return [(mutant, path) for path in paths for mutant in chosen if path in mutant.seeds]


def row_of(made: Comparison, mutant: Mutant, path: str, policy: Policy, clear: float = 1.0) -> Row:
    """The row of a mutant that was run; `clear` as in `gates`."""
    stage = mutant.stage_in(path)
    [verdict] = judge(made.renamed, policy)
    before = stage_calc_diff(stage, made.inputs, made.result.trace, made.faultless.trace)
    after, clean = (
        stage_calc_diff("score", made.inputs, trace, made.oracle) for trace in (made.result.trace, made.faultless.trace)
    )
    usual = exercised_recall(made.inputs, made.faultless.trace, made.oracle)
    found = exercised_recall(made.inputs, made.result.trace, made.oracle)
    return Row(
        mutant=mutant.name,
        path=path,
        report=mutant.report,
        case=mutant.case.id,
        stage_seeded=stage,
        stage_named=(verdict.stage or "") if verdict.answer == "bug" else "",
        killed_by=tuple(sorted(gates(made.result.records, policy, clear) - gates(made.faultless.records, policy))),
        calc_diff=_short(before),
        calc_diff_would=not before < CALC_DIFF_LIMIT,
        calc_diff_score=_short(after),
        calc_diff_score_would=clean < CALC_DIFF_LIMIT and not after < CALC_DIFF_LIMIT,
        recall=_short(found),
        recall_would=found < RECALL_SHARE * usual,
    )


def _short(value: float) -> float:
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else math.inf


def build(
    names: Sequence[str] = (),
    paths: Sequence[str] = PATHS,
    policy: str = "default",
    clear: float = 1.0,
    say: Callable[[Comparison], str] | None = None,
    on_row: Callable[[Row], None] = lambda _: None,
) -> list[Row]:
    """Rows of these mutants and paths (all by default); `clear` as in `gates`, `say` gives the `blame` column."""
    bench, chosen, rows = Bench(), load_policy(policy), []
    for mutant, path in pairs(names, paths):
        made = bench.compare(mutant, path)
        rows.append(row_of(made, mutant, path, chosen, clear))
        if say:
            rows[-1] = replace(rows[-1], blame=say(made))
        on_row(rows[-1])
    return rows


def save(rows: Iterable[Row], file: File = MATRIX) -> None:
    """Writes the matrix, one row a line, so that a change shows as the lines of the mutants it concerns."""
    lines = ",\n".join("  " + json.dumps(_plain(asdict(row))) for row in rows)
    part = file.with_suffix(".part")
    part.write_text(f'{{"schema": {SCHEMA}, "rows": [\n{lines}\n]}}\n')
    part.replace(file)


def _plain(raw: dict[str, object]) -> dict[str, object]:
    """Infinity as a string, since JSON has none."""
    return {name: "inf" if value == math.inf else value for name, value in raw.items()}


def load(file: File = MATRIX) -> list[Row]:
    """Reads a matrix. ValueError names the file and what is wrong with it."""
    try:
        raw = json.loads(file.read_text())
        if raw["schema"] != SCHEMA:
            raise ValueError(f"its schema is {raw['schema']!r}, this version reads {SCHEMA}")
        numbers = ("calc_diff", "calc_diff_score", "recall")
        return [
            Row(**{**item, "killed_by": tuple(item["killed_by"]), **{name: float(item[name]) for name in numbers}})
            for item in raw["rows"]
        ]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{file} is not a kill matrix: {error}; make it again with `make mutants`") from error


def lost(kept: Iterable[Row], now: Iterable[Row]) -> list[str]:
    """What got worse, in sentences: a gate that no longer catches a mutant, or another stage named."""
    fresh = {(row.mutant, row.path): row for row in now}
    found = []
    for old in kept:
        new = fresh.get((old.mutant, old.path))
        if new is None:
            continue
        where = f"{old.mutant} in {old.path}"
        gone = sorted(set(old.killed_by) - set(new.killed_by))
        if gone:
            found.append(f"{where}: no longer caught by {', '.join(gone)}")
        if new.stage_named != old.stage_named:
            found.append(f"{where}: named {new.stage_named or 'nothing'}, before {old.stage_named or 'nothing'}")
    return found


def cover(rows: Sequence[Row]) -> list[Row]:
    """Few rows that between them need every gate on the result (accumulated, budget) that kills anything.

    The isolated gates need no cover: the stage at fault alone shows what they say (`Bench.check_stage`). Greedy: always
    the row that adds most; of equal ones the first.
    """
    wanted = {gate for row in rows for gate in _on_result(row)}
    chosen: list[Row] = []
    while wanted:
        chosen.append(max(rows, key=lambda row: len(_on_result(row) & wanted)))
        wanted -= _on_result(chosen[-1])
    return chosen


def _on_result(row: Row) -> set[str]:
    return {gate for gate in row.killed_by if " isolated " not in gate}
