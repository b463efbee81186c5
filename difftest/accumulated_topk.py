"""The certified selection: recall, and for every swapped entry whether the declared formats explain it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .certify import epsilon
from .cut_sample import cut_facts
from .measured import Measured
from .paths.base import Declaration
from .record import Finding, Worst
from .reference.inputs import LayerInputs
from .selection import as_mask, recall, value_recall
from .text import apart
from .trace import Trace


def compare_selection(inputs: LayerInputs, trace: Trace, baseline: Trace, declares: Declaration) -> Measured:
    """Recall of exercised rows, certified swaps and the boundary census against the baseline's scores.

    A swapped entry (selected by one side only) is explained iff the baseline's score of it lies within eps_i + eps_k of
    the k-th, eps being what declared formats and arithmetic may do to a score (`certify.epsilon`). `swap_excess` is the
    largest distance in units of that; above 1 it is a finding, whatever the recall.
    """
    chosen, wanted = trace.value("topk"), baseline.value("topk")
    score, visible, k = baseline.value("score"), inputs.visible, chosen.shape[1]
    exercised = (visible > k).nonzero()[:, 0]
    if not len(exercised):
        longest = int(visible.max()) if len(visible) else 0
        return Measured(
            skipped="selection not exercised",
            facts={"why": f"the longest row has {longest} visible entries and k is {k}"},
        )
    rows_score, rows_visible = score[exercised], visible[exercised]
    share = recall(chosen[exercised], wanted[exercised], score.shape[1])
    by_value = value_recall(chosen[exercised], rows_score, rows_visible)
    metrics = {"rows_exercised": float(len(exercised))}
    metrics |= _distribution("recall", share) | _distribution("value_recall", by_value)
    census = _Census(inputs, trace, baseline, declares)
    for row in exercised.tolist():
        census.add(row)
    metrics |= census.metrics()
    bounds = {"swap_excess": 1.0, "unexplained": 0.0}
    facts = {"unit": "share of the baseline's selection"}
    facts |= cut_facts(inputs, trace, baseline, share, exercised, census.gaps)
    return Measured(metrics, bounds, census.findings, census.worst, facts=facts)


def _distribution(name: str, share: Tensor) -> dict[str, float]:
    """Mean, median, first percentile and worst row."""
    return {
        name: float(share.mean()),
        f"{name}_median": float(share.quantile(0.5)),
        f"{name}_p1": float(share.quantile(0.01)),
        f"{name}_worst": float(share.min()),
    }


@dataclass
class _Row:
    """One row's cut: entries looked at, their baseline scores and eps; the cut's two sides come first."""

    entries: Tensor
    score: Tensor
    eps: Tensor
    format_share: float


class _Census:
    """Walks exercised rows: which swaps are explained, and what the cut looks like in units of eps."""

    def __init__(self, inputs: LayerInputs, trace: Trace, baseline: Trace, declares: Declaration) -> None:
        self.inputs, self.trace, self.baseline, self.declares = inputs, trace, baseline, declares
        self.findings: list[Finding] = []
        self.worst: Worst | None = None
        self.swap_excess = 0.0
        self.swapped = self.unexplained = 0
        self.gaps: list[float] = []
        self.bands: list[int] = []
        self.equal: list[int] = []
        self.tied = 0
        self.eps: list[float] = []

    def add(self, row: int) -> None:
        count = int(self.inputs.visible[row])
        score = self.baseline.value("score")[row, :count].double()
        k = self.trace.value("topk").shape[1]
        ranked = score.topk(k + 1)
        sides = ranked.indices[k - 1 :]
        mine, theirs = (as_mask(trace.value("topk")[row : row + 1], count)[0] for trace in (self.trace, self.baseline))
        swapped = (mine != theirs).nonzero()[:, 0]
        entries = torch.cat((sides, swapped))
        eps = epsilon(self.inputs, row, entries, self.baseline, self.declares).total
        kth, eps_kth = score[sides[0]], eps[0]
        side_width = float(eps[0] + eps[1])
        gap = float(score[sides[0]] - score[sides[1]])
        self.gaps.append(gap / side_width if side_width else (torch.inf if gap else 0.0))
        self.bands.append(int(((score - kth).abs() <= 2 * eps_kth).sum()))
        self.eps.append(float(eps_kth))
        self.equal.append(int((score == kth).sum()))
        self.tied += gap == 0
        if len(swapped):
            self._certify(row, swapped, score[swapped], kth, eps[2:] + eps_kth)

    def _certify(self, row: int, swapped: Tensor, score: Tensor, kth: Tensor, width: Tensor) -> None:
        distance = (score - kth).abs()
        excess = torch.where(distance == 0, 0.0, distance / width)
        self.swapped += len(swapped)
        bad = int((excess > 1).sum())
        self.unexplained += bad
        peak = int(excess.argmax())
        if self.worst is not None and float(excess[peak]) <= self.swap_excess:
            return
        self.swap_excess = float(excess[peak])
        entry = int(swapped[peak])
        values = (float(score[peak]), float(kth), float(width[peak]))
        self.worst = Worst({"row": row, "entry": entry}, *values)
        if bad:
            got, want, bound = apart(*values)
            side = "leaves out" if float(score[peak]) > float(kth) else "selects"
            message = (
                f"row {row} {side} entry {entry}, whose exact score {got} is further from the cut {want} than the "
                f"declared formats explain ({bound})"
            )
            self.findings = [Finding("unexplained_swap", message, {"row": row, "entry": entry})]

    def metrics(self) -> dict[str, float]:
        gaps = torch.tensor(self.gaps, dtype=torch.float64)
        return {
            "swapped": float(self.swapped),
            "unexplained": float(self.unexplained),
            "swap_excess": self.swap_excess,
            "gap_median": float(gaps.quantile(0.5)),
            "gap_least": float(gaps.min()),
            "band_mean": sum(self.bands) / len(self.bands),
            "band_most": float(max(self.bands)),
            "equal_at_cut": float(max(self.equal)),
            "tied_rows": float(self.tied),
            "eps_mean": sum(self.eps) / len(self.eps),
        }
