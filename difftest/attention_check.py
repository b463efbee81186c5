"""The isolated check of stage `attention`: every element, every row's error as a whole, and every head's size."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from . import bounds, findings
from .ball import EVENTS, FAILURE, Ball, quantile
from .bounds_attention import UNIFORM, RowBall, row_ball
from .measured import Measured, named, stride
from .metrics import Tally
from .paths.base import Declaration
from .record import Finding
from .reference.attention import packed_selection
from .reference.inputs import LayerInputs
from .trace import Trace

TINY = torch.finfo(torch.float64).tiny
SHARES = 4
"""Rows are judged one at a time, a millisecond each: 1,024 rows of V4-Flash's 64 heads of 512 are judged whole."""


def check_attention(inputs: LayerInputs, trace: Trace, declares: Declaration) -> Measured:
    """Judges output and log-sum-exp on the path's own selection and latents.

    excess    over elements of both tensors.
    row_rms   the largest ratio of a row's error norm to its bound (at most 1): sees noise that the bound of a single
              element hides, such as an undeclared rounding.
    gain      the head whose output is scaled most, <got, exact> / <exact, exact> - 1 over all rows, beside its bound:
              sees a sink that is missing, doubled or shifted.
    gain_all  the same over all heads together: sees a rounding that leans to one side, such as truncation.
    """
    value, lse = trace["attention"]["value"], trace["attention"]["lse"]
    fault = selection_fault(inputs, trace)
    if fault:
        return Measured(skipped=fault)
    bad = findings.not_finite("attention", value, named("row", "head", "dim"))
    bad += findings.not_finite("attention.lse", lse.masked_fill(lse == -torch.inf, 0.0), named("row", "head"))
    if bad:
        return Measured(findings=bad)
    judge = _Judge(declares, inputs.config.num_attention_heads)
    for row, ball in row_balls(inputs, trace, declares, judged_rows(len(value), value.numel())):
        judge.add(row, value[row].double(), lse[row].double(), ball)
    return judge.measured(distinct_queries(inputs))


def selection_fault(inputs: LayerInputs, trace: Trace) -> str:
    """Why the selection cannot be attended to, or ""."""
    if inputs.kind != "csa":
        return ""
    chosen = trace.value("topk")
    limit = torch.tensor(inputs.entries, device=chosen.device)[inputs.row_request]
    bad = (chosen < -1) | (chosen >= limit[:, None])
    if not bool(bad.any()):
        return ""
    row, slot = (int(part) for part in bad.nonzero()[0])
    return f"upstream topk[{row}, {slot}] is {int(chosen[row, slot])}, and its request has {int(limit[row])} entries"


def distinct_queries(inputs: LayerInputs) -> bool:
    """Whether no two rows or heads have the same query: only then do their rounding errors average out."""
    flat = inputs.attn_query.flatten(0, 1)
    probe = torch.linspace(1, 2, flat.shape[1], dtype=torch.float64, device=flat.device)
    return len(torch.unique(flat.double() @ probe)) == len(flat)


def judged_rows(rows: int, elements: int) -> list[int]:
    """All rows of an output of up to FULL_CHECK elements in each of SHARES shares; beyond, rows evenly spread, and the
    last one. The accumulated record covers every row in any case."""
    return sorted({*range(0, rows, stride(elements // SHARES)), rows - 1} - {-1})


def row_balls(
    inputs: LayerInputs, trace: Trace, declares: Declaration, rows: Iterable[int] | None = None
) -> Iterator[tuple[int, RowBall | None]]:
    """Rows (all by default) in order with their ball; None for a row without any valid slot."""
    window, compressed = trace["kv"]["window"], trace["kv"]["compressed"]
    topk = trace.value("topk") if inputs.kind == "csa" else None
    selected = packed_selection(inputs, topk)
    sink = inputs.attn_sink.double()
    for row in range(len(inputs.row_position)) if rows is None else rows:
        near, far = inputs.window_index[row], selected[row]
        values = torch.cat((window[near[near >= 0]], compressed[far[far >= 0]])).double()
        if not len(values):
            yield row, None
            continue
        query = bounds.attention_query(inputs, slice(row, row + 1), declares)[0]
        yield row, row_ball(query, values, sink, inputs.config.softmax_scale, declares)


@dataclass
class _Judge:
    """Accumulates rows."""

    declares: Declaration
    heads: int
    row_excess: float = 0.0
    worst_row: int = -1
    found: list[Finding] = field(default_factory=list)

    def __post_init__(self) -> None:
        output = "bf16" if self.declares.output == "bf16" else "fp32"
        self.value = Tally(output, named("row", "head", "dim"))
        self.lse = Tally("fp32", named("row", "head"))
        zeros = torch.zeros(self.heads, dtype=torch.float64)
        self.along, self.size, self.gain_variance, self.gain_shift = (zeros.clone() for _ in range(4))
        self.sample: list[tuple[Tensor, Tensor]] = []

    def add(self, row: int, got: Tensor, lse: Tensor, ball: RowBall | None) -> None:
        """One row: got [A, C], lse [A] fp64."""
        if ball is None:
            self._empty(row, got, lse)
            return
        self.value.add(got[None], Ball(ball.out.mid[None], ball.out.rad[None]), row, terms=ball.terms[None])
        self.lse.add(lse[None], Ball(ball.lse.mid[None], ball.lse.rad[None]), row)
        error = got - ball.out.mid
        bound = error_norm_bound(ball)
        ratio = float(error.norm()) / bound if bound else (math.inf if bool(error.any()) else 0.0)
        if ratio > self.row_excess:
            self.row_excess, self.worst_row = ratio, row
        self.along += (error * ball.out.mid).sum(-1).cpu()
        self.size += ball.out.mid.square().sum(-1).cpu()
        self.gain_variance += ball.gain_variance.cpu()
        self.gain_shift += ball.gain_shift.cpu()
        if len(self.sample) < 4:
            self.sample.append((got, ball.out.mid))

    def _empty(self, row: int, got: Tensor, lse: Tensor) -> None:
        if bool((got != 0).any()):
            head, dim = (int(part) for part in (got != 0).nonzero()[0])
            message = (
                f"row {row} attends to nothing and its output at head {head}, dim {dim} is {float(got[head, dim]):g}"
            )
            self.found.append(Finding("empty_row", message, {"row": row, "head": head, "dim": dim}))
        if bool((lse != -torch.inf).any()):
            message = f"row {row} attends to nothing and its log-sum-exp is {float(lse.amax()):g}, not -inf"
            self.found.append(Finding("empty_row", message, {"row": row}))

    def _granularity(self) -> list[Finding]:
        if self.declares.output == "bf16" or not self.sample:
            return []
        got, exact = (torch.stack(part) for part in zip(*self.sample, strict=True))
        return findings.granularity("attention", got, exact)

    def _gain(self) -> tuple[float, float, int]:
        """Deviation of the most scaled head, its bound, and the head."""
        size = self.size.clamp(min=TINY)
        deviation = self.along.abs() / size
        bound = (quantile() * self.gain_variance.sqrt() + self.gain_shift) / size
        head = int((deviation / bound.clamp(min=TINY)).argmax())
        return float(deviation[head]), float(bound[head]), head

    def _gain_all(self) -> tuple[float, float]:
        """Deviation of all heads together, and its bound."""
        size = max(float(self.size.sum()), TINY)
        bound = quantile() * math.sqrt(float(self.gain_variance.sum())) + float(self.gain_shift.sum())
        return abs(float(self.along.sum())) / size, bound / size

    def measured(self, independent: bool) -> Measured:
        value, lse = self.value, self.lse
        metrics = {
            "excess": max(value.excess, lse.excess),
            "deviation": value.deviation,
            "rms": value.rms_over_terms,
            "equal": value.equal_share,
            "lse_error": lse.largest_error,
            "lse_excess": lse.excess,
            "row_rms": self.row_excess,
        }
        limits = {"excess": 1.0, "deviation": value.deviation_allowed, "row_rms": 1.0}
        by_lse = lse.excess > value.excess
        facts = {
            "unit": "error / sum|terms|",
            "judged": value.elements,
            "worst_unit": "lse" if by_lse else "output",
            "worst_row": self.worst_row,
        }
        if independent:
            deviation, bound, head = self._gain()
            metrics["gain"], limits["gain"], facts["gain_head"] = deviation, bound, head
            metrics["gain_all"], limits["gain_all"] = self._gain_all()
        worst = lse.worst if by_lse else value.worst
        return Measured(metrics, limits, self.found + self._granularity(), worst, "", facts)


def error_norm_bound(ball: RowBall) -> float:
    """Bound of a row's error norm over all heads, failing with probability FAILURE over EVENTS rows.

    Norm of the shifts, plus that of a sum of independent vectors: root mean square, plus sqrt(2 t) times the weak
    deviation (Talagrand's inequality for norms of independent sums; t = log(EVENTS / FAILURE)). Errors of different
    heads are independent, so the weak variance is that of the worst head; a single rounding reaches sqrt(3) of its
    deviation.
    """
    level = math.log(EVENTS / FAILURE)
    weak = 2 * level * UNIFORM * float(ball.variance.max())
    deviation = math.sqrt(float(ball.variance.sum())) + math.sqrt(weak)
    return math.hypot(*ball.shift.tolist()) + deviation
