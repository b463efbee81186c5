"""Metrics and bounds of a stage as the properties that a JUnit test case carries."""

import math
from collections.abc import Iterable, Iterator

from ..record import Record


def properties(records: Iterable[Record]) -> Iterator[tuple[str, str]]:
    """(name, value) pairs: every metric as `isolated.excess`, its bound as `isolated.excess.bound`, rules, skips.

    `metric` and `bound` name the decisive one of the isolated comparison: the metric closest to its bound.
    """
    for record in records:
        decisive = nearest_to_bound(record)
        if record.comparison == "isolated" and decisive:
            yield "metric", f"{decisive} {record.metrics[decisive]:.6g}"
            yield "bound", f"{record.bounds[decisive]:.6g}"
        for name, value in record.metrics.items():
            yield f"{record.comparison}.{name}", f"{value:.6g}"
            if name in record.bounds:
                yield f"{record.comparison}.{name}.bound", f"{record.bounds[name]:.6g}"
        for finding in record.findings:
            yield f"{record.comparison}.finding", f"{finding.rule}: {finding.message}"
        if record.skipped:
            yield f"{record.comparison}.skipped", record.skipped


def nearest_to_bound(record: Record) -> str:
    """The bounded metric that uses the largest share of its bound, NaN before any; empty if none has a bound."""
    bounded = [name for name in record.metrics if record.bounds.get(name)]
    return max(bounded, key=lambda name: share(record, name), default="")


def share(record: Record, metric: str) -> float:
    """Value over bound of a metric; infinite for NaN, which no bound covers."""
    value = record.metrics[metric] / record.bounds[metric]
    return math.inf if math.isnan(value) else value
