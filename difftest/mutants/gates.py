"""What catches a mutant: the gates of this tool, and the two that the field uses."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from ..policy import Policy
from ..record import Record
from ..reference.inputs import LayerInputs
from ..selection import recall
from ..stages import STAGES, StageName
from ..trace import Trace

CALC_DIFF_LIMIT = 1e-3
"""DeepGEMM's tests fail from here on."""

RECALL_SHARE = 0.99
"""The recall gate: mean recall@k against fp64, at least this share of what the faultless path reaches. (The fp8 path
reaches 0.98 by itself, so a fixed 0.99 would reject it without any fault.)"""


CLEAR = 1.05
"""A bounded metric counts as a gate of the kept matrix from this multiple of its bound on, so that another processor's
last bits lose no gate."""


def gates(records: Iterable[Record], policy: Policy, clear: float = 1.0) -> set[str]:
    """Every rule that these records break, as "index_k isolated excess" or "topk budget value_recall".

    clear   multiple of a bound that its metric has to reach.
    """
    broken: set[str] = set()
    for record in records:
        broken |= {f"{record.stage} {record.comparison} {finding.rule}" for finding in record.findings}
        if record.comparison == "isolated":
            for metric, factor in policy.isolated.items():
                value, bound = record.metrics.get(metric), record.bounds.get(metric)
                if value is not None and bound is not None and not value <= clear * factor * bound:
                    broken.add(f"{record.stage} isolated {metric}")
            continue
        missed = [budget for budget in policy.budgets if budget.missed(record)]
        broken |= {f"{record.stage} budget {budget.metric}" for budget in missed}
    return broken


def calc_diff(got: Tensor, want: Tensor) -> float:
    """DeepGEMM's `calc_diff`: 1 - 2 <x, y> / (<x, x> + <y, y>) in fp64; NaN if either holds one, 0 for two zeros."""
    x, y = got.double(), want.double()
    size = float((x * x + y * y).sum())
    return 1 - 2 * float((x * y).sum()) / size if size else 0.0


def stage_calc_diff(stage: StageName, inputs: LayerInputs, trace: Trace, reference: Trace) -> float:
    """The largest `calc_diff` of a stage's tensors between two traces, only what the contract gives a meaning.

    score: visible columns. topk: the reference's scores of the picked entries, sorted (what a top-k kernel's test
    compares). lse: finite values. A shape that differs, or a NaN, is infinitely far.
    """
    if stage not in trace:
        return math.inf
    worst = 0.0
    for name in STAGES[stage].tensors:
        pair = [_meaning(stage, inputs, owner, reference, name) for owner in (trace, reference)]
        if pair[0].shape != pair[1].shape:
            return math.inf
        value = calc_diff(*pair)
        worst = max(worst, math.inf if math.isnan(value) else value)
    return worst


def _meaning(stage: StageName, inputs: LayerInputs, trace: Trace, reference: Trace, name: str) -> Tensor:
    tensor = trace[stage][name]
    if stage == "score":
        hidden = torch.arange(tensor.shape[1], device=tensor.device) >= inputs.visible[:, None]
        return tensor.masked_fill(hidden, 0.0)
    if stage == "topk":
        score = reference.value("score")
        picked = score.gather(1, tensor.long().clamp(0, score.shape[1] - 1))
        kept = (tensor >= 0) & (tensor < score.shape[1]) & picked.isfinite()
        return picked.masked_fill(~kept, 0.0).sort(1).values
    return tensor.masked_fill(tensor == -torch.inf, 0.0) if name == "lse" else tensor


def exercised_recall(inputs: LayerInputs, trace: Trace, oracle: Trace) -> float:
    """Mean recall of the rows that had to select, against the oracle's selection; 0 without one."""
    if "topk" not in trace:
        return 0.0
    k = inputs.config.index_topk
    rows = inputs.visible > k
    width = oracle.value("score").shape[1]
    return float(recall(trace.value("topk")[rows], oracle.value("topk")[rows], width).mean())
