"""The charts of a report: each with a caption, a drawing, and the numbers that it shows as a table."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..record import Record
from .evidence import Evidence
from .svg import FAINT, INK, LINES, MARKERS, SERIES, WARN, axes

LONGEST_NAME = 34
TICKS = 9
"""Labels of an axis of lengths or ranks."""
POINTS = 400
"""Points a series is thinned to before it is drawn."""
HATCHES = ("", "////", "....", "xxxx", "\\\\\\\\", "oooo", "++++", "----")
GAP_BINS = 24
LEAST_GAP, MOST_GAP = 1e-4, 1e3
"""Range of the gap histogram; gaps beyond are counted in its end bins."""


@dataclass(frozen=True)
class Chart:
    """What the template needs of a chart. `columns` and `rows` are the numbers behind it."""

    id: str
    title: str
    caption: str
    svg: str
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()


def charts(evidence: Evidence) -> list[Chart]:
    """Every chart for which the evidence has numbers."""
    made = (recall_curve, needle_curve, boundary_gaps, score_scatter, worst_row, stage_times, stage_memory, bench_rows)
    return [chart for draw in made if (chart := draw(evidence)) is not None]


def _picks(evidence: Evidence) -> list[Record]:
    """Accumulated top-k records against the oracle, of paths other than the oracle."""
    return [
        record
        for record in evidence.records
        if record.stage == "topk" and record.comparison == "accumulated" and record.path != "oracle" and record.metrics
    ]


def short(name: str) -> str:
    """A path's name for a legend; the tables have the whole."""
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 3]}..."


def legend(axis: Any) -> None:
    """Above the axes, where it hides nothing."""
    axis.figure.legend(loc="upper left", ncols=2, fontsize=8, borderaxespad=0.1)


def style(number: int) -> dict[str, Any]:
    """Colour, marker and dashes of a series: three ways to tell it from its neighbours."""
    place = number % len(SERIES)
    return {
        "color": SERIES[place],
        "marker": MARKERS[place],
        "linestyle": LINES[place],
        "markersize": 4,
        "linewidth": 1.2,
    }


def recall_curve(evidence: Evidence) -> Chart | None:
    """Mean and worst-row recall of every path against the longest request, from the records of all cases."""
    found: dict[str, dict[int, list[tuple[float, float]]]] = {}
    for record in _picks(evidence):
        lengths = evidence.cases.get(record.case, {}).get("lengths")
        if lengths and "recall" in record.metrics:
            pair = record.metrics["recall"], record.metrics.get("recall_worst", record.metrics["recall"])
            found.setdefault(record.path, {}).setdefault(max(lengths), []).append(pair)
    if not found:
        return None
    rows = []
    with axes("recall", len(found)) as (axis, drawing):
        for number, (path, by_length) in enumerate(found.items()):
            lengths = sorted(by_length)
            mean = [sum(pair[0] for pair in by_length[one]) / len(by_length[one]) for one in lengths]
            worst = [min(pair[1] for pair in by_length[one]) for one in lengths]
            axis.plot(lengths, mean, label=short(path), **style(number))
            axis.fill_between(lengths, worst, mean, color=SERIES[number % len(SERIES)], alpha=0.12, linewidth=0)
            rows += [(path, f"{n:,}", f"{m:.4f}", f"{w:.4f}") for n, m, w in zip(lengths, mean, worst, strict=True)]
        _token_axis(axis, [length for by_length in found.values() for length in by_length])
        axis.set_xlabel("tokens of the longest request")
        axis.set_ylabel("recall of the exact selection")
        axis.grid(axis="y")
        legend(axis)
    caption = "Line: mean over rows and layers. Band: down to the worst row."
    return Chart("recall", "Recall against length", caption, drawing.svg, ("path", "tokens", "mean", "worst row"), rows)


def needle_curve(evidence: Evidence) -> Chart | None:
    """Share of needles found against length: of in-process sweeps, and of facts asked of live servers."""
    found: dict[str, dict[int, list[bool]]] = {}
    for needle in evidence.sweep:
        if needle.result is not None:
            name = f"{needle.variant}, k {needle.k}, {needle.distractor}"
            found.setdefault(name, {}).setdefault(needle.length, []).append(needle.result.selected)
    for (server, suite, length, _), result in evidence.exchanges.items():
        if result in ("pass", "miss"):
            found.setdefault(f"server {server}, {suite}", {}).setdefault(length, []).append(result == "pass")
    if not found:
        return None
    rows = []
    lowest = sorted(found, key=lambda name: min(sum(hits) / len(hits) for hits in found[name].values()))
    drawn = [name for name in found if name in lowest[: len(SERIES)]]
    for name, by_length in found.items():
        rows += [(name, f"{n:,}", f"{sum(hits)} of {len(hits)}") for n, hits in sorted(by_length.items())]
    with axes("needle-curve", len(drawn)) as (axis, drawing):
        for number, name in enumerate(drawn):
            points = sorted(found[name].items())
            shares = [sum(hits) / len(hits) for _, hits in points]
            axis.plot([length for length, _ in points], shares, label=short(name), **style(number))
        _token_axis(axis, [length for by_length in found.values() for length in by_length])
        axis.set_ylim(-0.03, 1.03)
        axis.set_xlabel("tokens")
        axis.set_ylabel("share of needles found")
        axis.grid(axis="y")
        legend(axis)
    caption = "A needle is one planted entry (sweep) or one fact to be recalled (live server)."
    if len(found) > len(drawn):
        caption += f" Drawn are the {len(drawn)} of {len(found)} that lose most; the table has all."
    return Chart("needle-curve", "Needles against length", caption, drawing.svg, ("who", "tokens", "found"), rows)


def _token_axis(axis: Any, lengths: Sequence[int]) -> None:
    """A logarithmic axis of tokens, labelled at powers of two."""
    axis.set_xscale("log")
    ticks = [1 << bits for bits in range(8, 21) if min(lengths) <= 2 << bits and 1 << bits <= 2 * max(lengths)]
    axis.set_xticks(ticks, [f"{tick >> 10}k" if tick >= 1 << 10 else str(tick) for tick in ticks])
    axis.minorticks_off()


def boundary_gaps(evidence: Evidence) -> Chart | None:
    """How far the k-th score is from the next, in units of what formats and arithmetic may do to it."""
    found: dict[str, list[float]] = {}
    for record in _picks(evidence):
        gaps = record.facts.get("gaps") or [record.metrics[name] for name in ("gap_median",) if name in record.metrics]
        found.setdefault(record.path, []).extend(float(gap) for gap in gaps)
    found = {path: gaps for path, gaps in found.items() if gaps}
    if not found:
        return None
    edges = [LEAST_GAP * (MOST_GAP / LEAST_GAP) ** (step / GAP_BINS) for step in range(GAP_BINS + 1)]
    rows = []
    with axes("gaps", len(found)) as (axis, drawing):
        for number, (path, gaps) in enumerate(found.items()):
            clipped = [min(max(gap, LEAST_GAP), MOST_GAP) for gap in gaps if not math.isnan(gap)]
            look = style(number)
            axis.hist(
                clipped,
                bins=edges,
                histtype="step",
                label=short(path),
                color=look["color"],
                linestyle=look["linestyle"],
            )
            within = sum(gap <= 1 for gap in clipped)
            middle = sorted(clipped)[len(clipped) // 2]
            rows.append((path, f"{len(clipped):,}", f"{middle:.3g}", f"{within / len(clipped):.1%}"))
        axis.axvline(1, color=WARN, linewidth=1, linestyle="--")
        axis.text(1.2, 0.98, "beyond: no swap", transform=axis.get_xaxis_transform(), va="top", color=WARN)
        axis.set_xscale("log")
        axis.set_xlabel("gap at the cut / error bound")
        axis.set_ylabel("rows")
        legend(axis)
    caption = (
        "k-th score minus the next, over the two entries' error bounds. Left of 1 a format may swap them; right of it "
        "a swap is a bug."
    )
    return Chart("gaps", "Boundary gaps", caption, drawing.svg, ("path", "rows", "median", "within the bound"), rows)


def _cuts(evidence: Evidence) -> list[tuple[Record, dict[str, Any]]]:
    return [(record, cut) for record in _picks(evidence) for cut in record.facts.get("cuts") or []]


def score_scatter(evidence: Evidence) -> Chart | None:
    """Each path's scores against the oracle's around the cut, both measured from the cut."""
    series: dict[str, list[tuple[float, float]]] = {}
    for record, cut in _cuts(evidence):
        both = zip(map(float, cut["want"]), map(float, cut["got"]), strict=True)
        series.setdefault(record.path, []).extend((want - cut["cut"], got - cut["cut"]) for want, got in both)
    series = {path: thin([pair for pair in pairs if all(map(math.isfinite, pair))]) for path, pairs in series.items()}
    if not any(series.values()):
        return None
    with axes("scatter", len(series), height=3.3) as (axis, drawing):
        span = max((abs(want) for pairs in series.values() for want, _ in pairs), default=1.0) or 1.0
        axis.plot([-span, span], [-span, span], color=FAINT, linewidth=1)
        for number, (path, pairs) in enumerate(series.items()):
            look = style(number)
            axis.scatter(
                [pair[0] for pair in pairs],
                [pair[1] for pair in pairs],
                s=8,
                alpha=0.6,
                label=short(path),
                color=look["color"],
                marker=look["marker"],
            )
        axis.axhline(0, color=FAINT, linewidth=0.7, linestyle=":")
        axis.axvline(0, color=FAINT, linewidth=0.7, linestyle=":")
        axis.set_xlabel("oracle's score minus its k-th")
        axis.set_ylabel("the path's score minus the same")
        legend(axis)
    rows = [
        (path, f"{len(pairs)}", f"{max(abs(a - b) for a, b in pairs):.3g}") for path, pairs in series.items() if pairs
    ]
    caption = "Entries around the cut. Upper left and lower right: selected by one side only."
    return Chart(
        "scatter", "Scores around the cut", caption, drawing.svg, ("path", "entries", "largest difference"), rows
    )


def worst_row(evidence: Evidence) -> Chart | None:
    """The row with the lowest recall: its scores in the oracle's order, and what the path selected."""
    cuts = _cuts(evidence)
    if not cuts:
        return None
    first = evidence.first
    preferred = [pair for pair in cuts if first and (pair[0].path, pair[0].case) == (first.path, first.case)]
    record, cut = min(preferred or cuts, key=lambda pair: float(pair[1]["recall"]))
    mine = [flag == "1" for flag in cut["mine"]]
    theirs = [rank <= cut["k"] for rank in cut["rank"]]
    with axes("worst", 5, height=3.1) as (axis, drawing):
        places = list(range(len(mine)))
        axis.plot(places, [float(one) for one in cut["want"]], color=INK, linewidth=1, label="oracle's score")
        groups = (
            ("selected by both", (True, True), SERIES[0], "o"),
            ("left out by both", (False, False), FAINT, "."),
            ("lost: only the oracle's", (False, True), WARN, "v"),
            ("taken instead", (True, False), SERIES[1], "^"),
        )
        for label, sides, colour, marker in groups:
            some = [place for place in places if (mine[place], theirs[place]) == sides]
            if some:
                axis.scatter(
                    some,
                    [float(cut["got"][one]) for one in some],
                    s=18,
                    label=f"{label} ({len(some)})",
                    color=colour,
                    marker=marker,
                )
        axis.axvline(sum(theirs) - 0.5, color=FAINT, linewidth=1, linestyle="--")
        ticks = thin(places, TICKS)
        axis.set_xticks(ticks, [f"{cut['rank'][tick]:,}" for tick in ticks])
        axis.set_xlabel("rank in the oracle's order; only entries at the cut and swapped ones")
        axis.set_ylabel("the path's score")
        legend(axis)
    caption = (
        f"{record.case} layer {record.layer}, {record.path}: row {cut['row']} (request {cut['request']}, token "
        f"{cut['position']:,}) sees {cut['visible']:,} entries and shares {float(cut['recall']):.2%} of the selection."
    )
    cells = zip(cut["rank"], cut["entry"], cut["want"], cut["got"], mine, theirs, strict=True)
    rows = [
        (str(r), str(e), f"{float(w):.5g}", f"{float(g):.5g}", "yes" if a else "no", "yes" if b else "no")
        for r, e, w, g, a, b in cells
    ]
    columns = ("rank", "entry", "oracle's score", "path's score", "path selects", "oracle selects")
    return Chart("worst", "The worst row", caption, drawing.svg, columns, rows)


def thin(points: list[Any], limit: int = POINTS) -> list[Any]:
    """At most `limit` points, evenly spread over the list."""
    return points[:: max(1, math.ceil(len(points) / limit))]


def _by_path_and_stage(evidence: Evidence, fact: str) -> tuple[list[str], list[str], dict[tuple[str, str], float]]:
    """Paths, stages, and the median of a fact of isolated records; a list of repeats counts as its median."""
    found: dict[tuple[str, str], list[float]] = {}
    for record in evidence.records:
        value = record.facts.get(fact)
        if record.comparison == "isolated" and value:
            values = sorted(value) if isinstance(value, list) else [value]
            found.setdefault((record.path, record.stage), []).append(float(values[len(values) // 2]))
    middle = {key: sorted(values)[len(values) // 2] for key, values in found.items()}
    paths, stages = (list(dict.fromkeys(key[place] for key in middle)) for place in (0, 1))
    return paths, stages, middle


def _bars(
    name: str, evidence: Evidence, fact: str, scale: float, unit: str
) -> tuple[str, list[tuple[str, ...]]] | None:
    paths, stages, middle = _by_path_and_stage(evidence, fact)
    if len({stage for _, stage in middle}) < 2:
        return None
    with axes(name, len(paths), bottom=0.85) as (axis, drawing):
        for number, path in enumerate(paths):
            values = [middle.get((path, stage), 0.0) * scale for stage in stages]
            places = [place + 0.8 * number / len(paths) for place in range(len(stages))]
            look = {"color": SERIES[number % len(SERIES)], "hatch": HATCHES[number % len(HATCHES)], "edgecolor": FAINT}
            axis.bar(places, values, width=0.8 / len(paths), label=short(path), align="edge", linewidth=0.4, **look)
        axis.set_xticks([place + 0.4 for place in range(len(stages))], stages, rotation=30, ha="right")
        axis.set_yscale("log")
        axis.set_ylabel(unit)
        axis.grid(axis="y")
        legend(axis)
    rows = [
        (path, *(f"{middle[path, s] * scale:.3g}" if (path, s) in middle else "" for s in stages)) for path in paths
    ]
    return drawing.svg, [("path", *stages), *rows]


def stage_times(evidence: Evidence) -> Chart | None:
    """Median milliseconds of every stage as it ran in the cases: not a benchmark, but a regression shows."""
    made = _bars("times", evidence, "seconds", 1e3, "milliseconds")
    if made is None:
        return None
    caption = "Median over cases and layers of one run each, with whatever else the machine did."
    return Chart("times", "Time of stages", caption, made[0], made[1][0], made[1][1:])


def stage_memory(evidence: Evidence) -> Chart | None:
    """Median peak memory of every stage beyond what was there before it."""
    made = _bars("memory", evidence, "peak_bytes", 1 / 2**20, "MiB")
    if made is None:
        return None
    caption = "Median over cases and layers of the peak beyond what was held before the stage."
    return Chart("memory", "Memory of stages", caption, made[0], made[1][0], made[1][1:])


def bench_rows(evidence: Evidence) -> Chart | None:
    """Kernels of a bench as a share of the card's ceiling."""
    rows = [row for row in (evidence.bench or {}).get("rows", []) if row.get("share_of_ceiling") is not None]
    if not rows:
        return None
    formats = list(dict.fromkeys(row["format"] for row in rows))
    names = list(dict.fromkeys(f"{row['kernel']} {row['shape']}" for row in rows))
    with axes("bench", len(formats), height=max(2.0, 0.22 * len(names) + 0.6), left=2.2) as (axis, drawing):
        for number, form in enumerate(formats):
            mine = [row for row in rows if row["format"] == form]
            places = [names.index(f"{row['kernel']} {row['shape']}") for row in mine]
            shares = [100 * row["share_of_ceiling"] for row in mine]
            look = style(number)
            axis.plot(shares, places, label=form, color=look["color"], marker=look["marker"], linestyle="none")
        axis.set_yticks(range(len(names)), names, fontsize=7)
        axis.set_xlabel("% of the card's ceiling")
        axis.set_xlim(left=0)
        axis.grid(axis="x")
        legend(axis)
    columns = ("kernel", "shape", "format", "us", "of ceiling", "to fp8")
    cells = [_bench_cells(row) for row in rows]
    return Chart("bench", "Kernels against the ceiling", "From difftest bench.", drawing.svg, columns, cells)


def _bench_cells(row: dict[str, Any]) -> tuple[str, ...]:
    ratio = row.get("ratio_to_fp8")
    numbers = (f"{row['us']:.2f}", f"{row['share_of_ceiling']:.1%}", f"{ratio:.2f}" if ratio else "")
    return (row["kernel"], row["shape"], row["format"], *numbers)
