"""The isolated check of stage `attention`: every element, every row's error as a whole, and every head's size."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from . import bounds, findings
from .ball import EVENTS, FAILURE, quantile
from .bounds_attention import UNIFORM, AttentionBall, attention_ball
from .measured import Measured, named, stride
from .metrics import Locate, Tally
from .paths.base import Declaration
from .record import Finding
from .reference.attention import packed_selection
from .reference.inputs import LayerInputs
from .trace import Trace

TINY = torch.finfo(torch.float64).tiny
SHARES = 4
"""Rows take ten milliseconds each on a CPU: 1,024 rows of V4-Flash's 64 heads of 512 are judged whole."""

BATCH_ROWS = {"cpu": 4, "cuda": 64}
"""Rows judged at a time: on a CPU few enough for a core's cache, on a GPU enough to make its launches worth it."""

BATCH_BYTES = 1 << 31
"""Most that the temporaries of a batch may take."""

SAMPLE_ROWS = 4
"""Rows whose bits are looked at for an undeclared rounding."""


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
    judge = _Judge(declares, inputs.config.num_attention_heads, value.device)
    for rows, ball in row_balls(inputs, trace, declares, judged_rows(len(value), value.numel())):
        judge.add(rows, value[rows].double(), lse[rows].double(), ball)
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
    inputs: LayerInputs, trace: Trace, declares: Declaration, rows: Sequence[int] | None = None
) -> Iterator[tuple[list[int], AttentionBall | None]]:
    """Batches of neighbouring rows (all by default) in order with their ball; None for rows without any valid slot."""
    window, compressed = trace["kv"]["window"], trace["kv"]["compressed"]
    selected = packed_selection(inputs, trace.value("topk") if inputs.kind == "csa" else None)
    latents = torch.cat((window, compressed, window.new_zeros(1, window.shape[1])))
    chosen = torch.arange(len(selected)) if rows is None else torch.tensor(rows, dtype=torch.int64)
    at = chosen.to(window.device)
    far = selected[at]
    slots = torch.cat((inputs.window_index[at], torch.where(far >= 0, far + len(window), -1)), 1)
    slots = slots.sort(-1, descending=True).values
    count = (slots >= 0).sum(-1)
    counts, limit = count.tolist(), batch_rows(inputs, slots.shape[1])
    sink, scale = inputs.attn_sink.double(), inputs.config.softmax_scale
    for part in _batches(counts, limit):
        batch, width = chosen[part].tolist(), max(counts[part])
        if not width:
            yield batch, None
            continue
        query = bounds.attention_query(inputs, at[part], declares)
        values = latents[slots[part, :width]]  # -1 is the last of them, all zeros
        yield batch, attention_ball(query, values, count[part], sink, scale, declares)


def batch_rows(inputs: LayerInputs, slots: int) -> int:
    """Rows of so many slots that are judged at a time: each takes about three fp64 tensors over its slots' latents, a
    dozen over heads and slots, and two dozen over heads and dims."""
    heads, width = inputs.config.num_attention_heads, inputs.config.head_dim
    row = 8 * (3 * slots * width + 12 * heads * slots + 24 * heads * width)
    return max(1, min(BATCH_ROWS[inputs.attn_query.device.type], BATCH_BYTES // row))


def _batches(counts: list[int], limit: int) -> Iterator[slice]:
    """Neighbours, at most `limit`, with between half and twice as many slots as the first of them: they are padded to
    the same number."""
    start = 0
    for stop in range(1, len(counts) + 1):
        first = counts[start]
        if stop == len(counts) or stop - start == limit or not first <= 2 * counts[stop] <= 4 * first:
            yield slice(start, stop)
            start = stop


@dataclass
class _Judge:
    """Accumulates batches of rows, on their device.

    rows     those with a valid slot so far.   row_excess   error norm over its bound, one tensor [B] a batch.
    along, size, gain_variance, gain_shift   sums over rows, [A] fp64.   sample   a few rows of got and exact.
    """

    declares: Declaration
    heads: int
    device: torch.device
    rows: list[int] = field(default_factory=list)
    row_excess: list[Tensor] = field(default_factory=list)
    found: list[Finding] = field(default_factory=list)
    sample: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        output = "bf16" if self.declares.output == "bf16" else "fp32"
        self.value = Tally(output, self._named("row", "head", "dim"))
        self.lse = Tally("fp32", self._named("row", "head"))
        zeros = torch.zeros(4, self.heads, dtype=torch.float64, device=self.device)
        self.along, self.size, self.gain_variance, self.gain_shift = zeros

    def _named(self, *axes: str) -> Locate:
        """Names elements of the tensor of all `rows`."""
        locate = named(*axes)
        return lambda index: locate((self.rows[index[0]], *index[1:]))

    def add(self, rows: list[int], got: Tensor, lse: Tensor, ball: AttentionBall | None) -> None:
        """B rows: got [B, A, C], lse [B, A] fp64."""
        if ball is None:
            for row, one, its_lse in zip(rows, got, lse, strict=True):
                self._empty(row, one, its_lse)
            return
        start = len(self.rows)
        self.rows += rows
        self.value.add(got, ball.out, start, terms=ball.terms)
        self.lse.add(lse, ball.lse, start)
        exact = ball.out.mid
        error = got - exact
        norm = torch.linalg.vector_norm(error, dim=(-2, -1))
        self.row_excess.append(torch.where(norm == 0, 0.0, norm / error_norm_bound(ball)))
        self.along += (error * exact).sum((0, -1))
        self.size += exact.square().sum((0, -1))
        self.gain_variance += ball.gain_variance.sum(0)
        self.gain_shift += ball.gain_shift.sum(0)
        if start < SAMPLE_ROWS:
            self.sample.append((got[: SAMPLE_ROWS - start].clone(), exact[: SAMPLE_ROWS - start].clone()))

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

    def _worst_row(self) -> tuple[float, int]:
        """The largest ratio of a row's error norm to its bound, and the row; (0, -1) where no row has an error."""
        if not self.rows:
            return 0.0, -1
        ratios = torch.cat(self.row_excess).nan_to_num(nan=0.0, posinf=torch.inf)
        at = int(ratios.argmax())
        ratio = float(ratios[at])
        return ratio, self.rows[at] if ratio else -1

    def _granularity(self) -> list[Finding]:
        if self.declares.output == "bf16" or not self.sample:
            return []
        got, exact = (torch.cat(part) for part in zip(*self.sample, strict=True))
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
        row_excess, worst_row = self._worst_row()
        metrics = {
            "excess": max(value.excess, lse.excess),
            "deviation": value.deviation,
            "rms": value.rms_over_terms,
            "equal": value.equal_share,
            "lse_error": lse.largest_error,
            "lse_excess": lse.excess,
            "row_rms": row_excess,
        }
        limits = {"excess": 1.0, "deviation": value.deviation_allowed, "row_rms": 1.0}
        by_lse = lse.excess > value.excess
        facts = {
            "unit": "error / sum|terms|",
            "judged": value.elements,
            "worst_unit": "lse" if by_lse else "output",
            "worst_row": worst_row,
        }
        if independent:
            deviation, bound, head = self._gain()
            metrics["gain"], limits["gain"], facts["gain_head"] = deviation, bound, head
            metrics["gain_all"], limits["gain_all"] = self._gain_all()
        worst = lse.worst if by_lse else value.worst
        return Measured(metrics, limits, self.found + self._granularity(), worst, "", facts)


def error_norm_bound(ball: AttentionBall) -> Tensor:
    """Bound [B] of each row's error norm over all heads, failing with probability FAILURE over EVENTS rows.

    Norm of the shifts, plus that of a sum of independent vectors: root mean square, plus sqrt(2 t) times the weak
    deviation (Talagrand's inequality for norms of independent sums; t = log(EVENTS / FAILURE)). Errors of different
    heads are independent, so the weak variance is that of the worst head; a single rounding reaches sqrt(3) of its
    deviation.
    """
    level = math.log(EVENTS / FAILURE)
    weak = 2 * level * UNIFORM * ball.variance.amax(-1)
    deviation = ball.variance.sum(-1).sqrt() + weak.sqrt()
    bound: Tensor = torch.linalg.vector_norm(ball.shift, dim=-1) + deviation
    return bound
