"""What a stage's check measured, and how elements of its tensors are named."""

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Any

from .metrics import Locate, Tally
from .record import Finding, Worst
from .reference.inputs import LayerInputs

FULL_CHECK = 1 << 23
"""Elements of a tensor over its entries up to which every entry is judged; beyond, evenly spread pieces are."""


@dataclass
class Measured:
    """What a stage's check found; becomes the isolated record."""

    metrics: dict[str, float] = field(default_factory=dict)
    bounds: dict[str, float] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    worst: Worst | None = None
    skipped: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


def entry_locator(inputs: LayerInputs) -> Locate:
    """Names elements of a tensor over packed entries: request, entry within it, dim."""
    offset = inputs.entry_offset

    def locate(index: tuple[int, ...]) -> dict[str, int]:
        request = min(bisect_right(offset, index[0]) - 1, len(offset) - 2)
        return {"request": request, "entry": index[0] - offset[request], "dim": index[1]}

    return locate


def named(*axes: str) -> Locate:
    """Names elements by axis."""
    return lambda index: dict(zip(axes, index, strict=False))


def stride(elements: int) -> int:
    """1 for a tensor of up to FULL_CHECK elements; beyond, judging every stride-th piece keeps to that many."""
    return max(1, -(-elements // FULL_CHECK))


def plain(tally: Tally, unit: str) -> Measured:
    """Metrics of a tensor stored as numbers of a format, without scales."""
    codes = tally.format != "fp32"
    deviation = float(tally.code_distance) if codes else tally.relative_error
    allowed = float(tally.code_allowed) if codes else tally.relative_allowed
    metrics = {
        "excess": tally.excess,
        "deviation": deviation,
        "equal": tally.equal_share,
        "max_error": tally.largest_error,
        "relative_error": tally.relative_error,
    }
    if codes:
        metrics |= {"codes_equal": tally.equal_share, "code_distance": float(tally.code_distance)}
    facts = {"unit": "ULP" if codes else unit, "judged": tally.elements}
    if tally.unjudged:
        facts["unjudged"] = tally.unjudged
    return Measured(metrics, {"excess": 1.0, "deviation": allowed}, [], tally.worst, "", facts)
