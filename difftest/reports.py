"""Paths against the contracts of public bug reports: `difftest reports`."""

from collections.abc import Sequence
from typing import Any

from .cases.field_reports import FIELD_REPORTS
from .path_components import PathComponents
from .paths.base import get_path
from .stages import nearest

_CALLER = "a scheduler must not hand it negative ends"
_FILLED = "a row with too few numbers is filled with NaN entries"
KNOWN: dict[str, dict[str, str]] = {
    "deepseek": {"t6-nan-scores": "the published top-k orders NaN first"},
    "sglang-fp8-model": {"t6-nan-scores": _FILLED, "l7-negative-ends": _CALLER},
    "bf16-k": {"t6-nan-scores": _FILLED, "l7-negative-ends": _CALLER},
}
"""Contracts that a path does not keep, and why that is known. SGLang's top-k takes positions as they come."""


def check_reports(ids: Sequence[str], specs: Sequence[str]) -> list[dict[str, Any]]:
    """One row for each report and path: kept, known, broken, or out of reach of a stage boundary.

    No ids: every report. ValueError with the nearest names for an unknown report or path.
    """
    for name in ids:
        if name not in FIELD_REPORTS:
            raise ValueError(nearest(name, list(FIELD_REPORTS), "field report"))
    paths = {spec: PathComponents(get_path(spec)) for spec in specs}
    return [_check(name, spec, paths[spec]) for name in ids or FIELD_REPORTS for spec in specs]


def _check(name: str, spec: str, components: PathComponents) -> dict[str, Any]:
    report = FIELD_REPORTS[name]
    violations = components.check(report)
    known = KNOWN.get(spec, {}).get(name, "")
    if violations is None:
        answer, why = "out of reach", f"no stage boundary reaches `{report.kind}`; the contract itself is tested"
    elif violations:
        answer, why = ("known", known) if known else ("broken", f"{violations[0].rule}: {violations[0].message}")
    else:
        answer, why = "kept", report.contract
    return {"report": name, "stage": report.stage, "path": spec, "answer": answer, "why": why}
