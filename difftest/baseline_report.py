"""A judged comparison in aligned columns and as markdown: what moved, how much, against what bound."""

from collections import Counter

from .baseline_verdict import Answer, Judged, Row, SpeedRow

SHOWN = 20
ORDER: tuple[Answer, ...] = ("worse", "too few seeds", "better", "moved", "noise", "same")
NUMBERS = ("base", "head", "difference", "95 % interval", "effect", "p adjusted", "seeds", "answer")
TIMES = ("times", "head / base", "interval", "noise floor", "answer")


def lines(judged: Judged) -> list[str]:
    """The report for a terminal."""
    moved = _shown(judged)
    made = _table([("metric", *NUMBERS), *((_name(row), *_cells(row)) for row in moved)]) if moved else []
    made.append(_counts(judged))
    if judged.speeds:
        made += [
            "",
            *_table([("time of", *TIMES), *((f"{row.path} {row.stage}", *_times(row)) for row in judged.speeds)]),
        ]
    made += [f"latency not compared, the machines differ in {fact}" for fact in judged.comparison.mixed]
    for title, names in _lists(judged):
        made += ["", f"{title}: {len(names)}", *(f"  {name}" for name in names[:SHOWN])]
        made += [f"  ... and {len(names) - SHOWN} more"] if len(names) > SHOWN else []
    return [*made, "", judged.sentence()]


def markdown(judged: Judged) -> str:
    """The report for a job summary, the conclusion first."""
    made = [f"**{judged.sentence()}**", "", _counts(judged)]
    if moved := _shown(judged):
        made += ["", *_markdown_table([("metric", *NUMBERS), *((_name(row), *_cells(row)) for row in moved)])]
    if judged.speeds:
        rows = [(f"{row.path} {row.stage}", *_times(row)) for row in judged.speeds]
        made += ["", *_markdown_table([("time of", *TIMES), *rows])]
    for title, names in _lists(judged):
        made += ["", f"{title}: {len(names)}", "", *(f"- {name}" for name in names[:SHOWN])]
    return "\n".join([*made, ""])


def _shown(judged: Judged) -> list[Row]:
    """Rows that differ, worst answers and smallest p first."""
    differing = [row for row in judged.rows if row.answer != "same"]
    return sorted(differing, key=lambda row: (ORDER.index(row.answer), row.adjusted, -abs(row.effect)))[:SHOWN]


def _counts(judged: Judged) -> str:
    counts = Counter(row.answer for row in judged.rows)
    hidden = sum(row.answer != "same" for row in judged.rows) - len(_shown(judged))
    said = ", ".join(f"{counts[answer]} {answer}" for answer in ORDER if counts[answer])
    tail = f"; {hidden} that differ are not shown" if hidden else ""
    return f"{len(judged.rows)} metrics under policy {judged.policy}: {said or 'none'}{tail}"


def _lists(judged: Judged) -> list[tuple[str, list[str]]]:
    made = judged.comparison
    named = [("new findings", made.findings), ("no number any more", made.broken)]
    named += [("unused baselines", made.unused), ("missing baselines", made.missing)]
    return [(title, names) for title, names in named if names]


def _name(row: Row) -> str:
    return row.key.words()


def _cells(row: Row) -> tuple[str, ...]:
    low, high = row.interval
    numbers = (f"{row.base:.6g}", f"{row.head:.6g}", f"{row.mean:+.3g}", f"[{low:+.3g}, {high:+.3g}]")
    return (*numbers, f"{row.effect:+.2f}", f"{row.adjusted:.2g}", str(row.seeds), row.answer)


def _times(row: SpeedRow) -> tuple[str, ...]:
    low, high = row.interval
    return (str(row.samples), f"{row.ratio:.3f}", f"[{low:.3f}, {high:.3f}]", f"{row.floor:.1%}", row.answer)


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[number]) for row in rows) for number in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _markdown_table(rows: list[tuple[str, ...]]) -> list[str]:
    made = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return [made[0], "|" + "---|" * len(rows[0]), *made[1:]]
