"""The HTML report: one file that needs nothing else, the verdict first."""

import json
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

from ..verdict import Summary, Verdict
from .evidence import Evidence
from .figures import charts
from .grids import Heatmap, details, heatmaps, needle_grids
from .markdown import conclusion, moved_rows, run_again
from .svg import INSTALL, NoPlots

STATES = {"agrees": "good", "explained": "warn", "cannot judge": "warn", "bug": "bad"}
MARKS = {"agrees": "✓", "explained": "~", "cannot judge": "?", "bug": "✗"}
ANSWERS = {"AGREES": ("good", "✓"), "CANNOT JUDGE": ("warn", "?"), "DISAGREES": ("bad", "✗")}


def html(evidence: Evidence) -> str:
    """The whole page. NoPlots if matplotlib or jinja2 is not installed."""
    try:
        from jinja2 import Environment
    except ImportError as error:
        raise NoPlots(f"the HTML report needs jinja2: {INSTALL}") from error
    template = Environment(autoescape=True, trim_blocks=True).from_string(_file("report.html.j2"))
    maps = heatmaps(evidence)
    state, mark = ANSWERS[evidence.answer]
    return template.render(
        answer=evidence.answer,
        state=state,
        mark=mark,
        lead=conclusion(evidence),
        command=run_again(evidence.first) if evidence.first else "",
        policy=evidence.policy,
        summaries=[_summary(summary) for summary in evidence.summaries],
        problems=evidence.problems,
        left_out=[unit for manifest in evidence.manifests for unit in manifest.get("left_out") or []],
        baseline=_baseline(evidence),
        heatmaps=[_heatmap(one, evidence.summaries) for one in maps],
        charts=charts(evidence),
        grids=needle_grids(evidence),
        environment=list(_environment(evidence)),
        counts=f"{len(evidence.records):,} records of {len({v.case for v in evidence.verdicts})} cases",
        details=_script_json([details(one) for one in maps]),
        style=_safe(_file("report.css")),
        script=_safe(_file("report.js")),
    )


def _file(name: str) -> str:
    return (files(__package__) / "templates" / name).read_text()


def _safe(text: str) -> Any:
    from markupsafe import Markup

    return Markup(text)


def _script_json(value: Any) -> str:
    """JSON that no record can end the script element with."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")


def _summary(summary: Summary) -> dict[str, str]:
    return {
        "path": summary.path,
        "answer": summary.answer,
        "state": STATES[summary.answer],
        "mark": MARKS[summary.answer],
        "counts": ", ".join(f"{count} {answer}" for answer, count in summary.counts.items()),
        "first": _first(summary.first),
    }


def _first(verdict: Verdict) -> str:
    return "" if verdict.answer == "agrees" else f"{verdict.case} layer {verdict.layer}: {verdict.text}"


def _heatmap(made: Heatmap, summaries: list[Summary]) -> dict[str, Any]:
    """The map of a path; one with a bug is open from the start, or the last if there is none."""
    bugs = sum(cell.state == "bug" for *_, cells in made.layers for cell in cells)
    worst = any(summary.answer == "bug" for summary in summaries)
    return {
        **vars(made),
        "open": bool(bugs) if worst else made.path == summaries[-1].path,
        "state": "bad" if bugs else "good",
        "mark": "✗" if bugs else "✓",
        "says": f"{bugs} outside" if bugs else "all within",
    }


def _baseline(evidence: Evidence) -> dict[str, Any] | None:
    if evidence.baseline is None:
        return None
    return {"sentence": evidence.baseline["sentence"], "rows": moved_rows(evidence.baseline)}


def _environment(evidence: Evidence) -> Iterator[tuple[str, str]]:
    """Facts of all runs; where they differ, every value."""
    facts: dict[str, list[str]] = {}
    for manifest in evidence.manifests:
        found = dict(
            manifest.get("environment") or {}, started=manifest.get("started", ""), device=manifest.get("device", "")
        )
        for name, value in found.items():
            if value and str(value) not in facts.setdefault(name, []):
                facts[name].append(str(value))
    yield from ((name, ", ".join(values)) for name, values in facts.items() if values)
