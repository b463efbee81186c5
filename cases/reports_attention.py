"""Field report about attention: A2 and A3, a NaN in slot 0 and the sink."""

import torch
from torch import Tensor

from ..reference.attention import sparse_attention
from .field_report import Component, Fault, FieldReport, Violation, draw

WIDTH, HEADS, ENTRIES = 64, 4, 80
SINKS = (0.0, 2.0, -1e30, 200.0)
ATTENTION_SLACK = 2.0**-6
"""Error over sum(abs(terms)): P and the output rounded to bf16, 2^-8 each, and a factor 2 for exp and sums in fp32."""


def _exact(q: Tensor, kv: Tensor, index: Tensor, sink: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    none = torch.full((len(q), 1), -1)
    return sparse_attention(q, kv[:0], none, kv, index, sink, scale)


def _inputs(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """q [rows, HEADS, WIDTH], kv [ENTRIES, WIDTH] with a NaN in slot 0, both exact in bf16; index [rows, 24]."""
    q = draw("a2").normal("q", rows, HEADS, WIDTH, dtype=torch.bfloat16).float()
    kv = draw("a2").normal("kv", ENTRIES, WIDTH, dtype=torch.bfloat16).float()
    kv[0] = torch.nan
    index = torch.stack([draw("a2").permutation(f"index/{row}", ENTRIES - 1)[:24] + 1 for row in range(rows)])
    index[0::4, 12:] = -1  # behind
    index[1::4, :12] = -1  # in front: a whole first block without a key
    index[2::4, ::2] = -1  # between
    index[-1] = -1  # nothing at all
    return q, kv, index


def _check_attention(attention: Component) -> list[Violation]:
    scale, found = WIDTH**-0.5, []
    for rows in (64, 65):
        q, kv, index = _inputs(rows)
        sink = torch.tensor(SINKS)
        out, lse = (part.double() for part in attention(q, kv, index, sink, scale))
        found += _finite(out, rows)
        by_hand = _by_hand(q, kv, index, scale)
        found += _compare(out, lse, by_hand, sink, rows)
        if (out[-1] != 0).any():
            found.append(Violation("empty row is 0", f"{rows} rows: output {float(out[-1].abs().max()):.3g}"))
    return found


def _finite(out: Tensor, rows: int) -> list[Violation]:
    bad = (~out.isfinite()).flatten(1).any(1).nonzero()[:, 0].tolist()
    return [Violation("finite", f"{rows} rows: row {bad[0]} and {len(bad) - 1} more are not finite")] if bad else []


def _by_hand(q: Tensor, kv: Tensor, index: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Output without a sink, log-sum-exp and sum of absolute terms, over the valid keys of each row only."""
    out, size = torch.zeros(2, *q.shape, dtype=torch.float64)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float64)
    for row in range(len(q)):
        keys = kv[index[row][index[row] >= 0]].double()
        if len(keys):
            logit = q[row].double() @ keys.T * scale
            lse[row] = logit.logsumexp(1)
            out[row], size[row] = logit.softmax(1) @ keys, logit.softmax(1) @ keys.abs()
    return out, lse, size


def _compare(
    out: Tensor, lse: Tensor, by_hand: tuple[Tensor, Tensor, Tensor], sink: Tensor, rows: int
) -> list[Violation]:
    plain, want_lse, size = by_hand
    share = torch.sigmoid(want_lse - sink.double())[..., None]  # out = out without sink * sigmoid(lse - sink)
    room = ATTENTION_SLACK * size * share + torch.finfo(torch.float32).tiny
    off = ((out - plain * share).abs() / room).nan_to_num(nan=0.0).amax(-1)  # a NaN is the other rule's
    found = []
    for head in (off > 1).any(0).nonzero()[:, 0].tolist():
        worst = float(off[:, head].max())
        found.append(Violation("sink once", f"{rows} rows, sink {SINKS[head]:g}: off by {worst:.3g} of the slack"))
    valid = want_lse.isfinite()
    far = (lse - want_lse)[valid].abs().nan_to_num(nan=0.0)
    if far.numel() and float(far.max()) > ATTENTION_SLACK:
        found.append(Violation("lse without sink", f"{rows} rows: log-sum-exp off by {float(far.max()):.3g}"))
    return found


def _nan_leaks(q: Tensor, kv: Tensor, index: Tensor, sink: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Masked lanes gather slot 0 and multiply it by 0."""
    keys = kv.double()[index.clamp(min=0)]
    logit = torch.einsum("rhc,rkc->rhk", q.double(), keys) * scale
    logit = logit.masked_fill((index < 0)[:, None], -torch.inf)
    lse = logit.logsumexp(-1)
    return (logit - torch.logaddexp(lse, sink.double())[..., None]).exp() @ keys, lse


def _sink_dropped(q: Tensor, kv: Tensor, index: Tensor, sink: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return _exact(q, kv, index, torch.full_like(sink, -torch.inf), scale)


def _sink_in_each_part(q: Tensor, kv: Tensor, index: Tensor, sink: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Two parts of the keys, each with the sink in its denominator, merged by log-sum-exp."""
    half = index.shape[1] // 2
    parts = [_exact(q, kv, part, sink, scale) for part in (index[:, :half], index[:, half:])]
    sums = torch.stack([torch.logaddexp(lse, sink.double()) for _, lse in parts])
    weight = (sums - sums.logsumexp(0)).exp()[..., None]
    lse = torch.stack([lse for _, lse in parts]).logsumexp(0)
    return weight[0] * parts[0][0] + weight[1] * parts[1][0], lse


def _sink_in_lse(q: Tensor, kv: Tensor, index: Tensor, sink: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    out, lse = _exact(q, kv, index, sink, scale)
    return out, torch.logaddexp(lse, sink.double())


def _sink_overflows(q: Tensor, kv: Tensor, index: Tensor, sink: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """exp(sink) is made in fp32 without subtracting the maximum: 200 overflows, and infinity over infinity is NaN."""
    _, lse = _exact(q, kv, index, sink, scale)
    plain, _ = _sink_dropped(q, kv, index, sink, scale)
    top = lse.float().exp()
    factor = sink.exp()
    return plain * (1 - factor / (top + factor)).double()[..., None], lse


ATTENTION_REPORTS = (
    FieldReport(
        id="a2-a3-slot-0-and-sink",
        code="A2+A3",
        stage="attention",
        kind="attention",
        urls=(
            "https://github.com/sgl-project/sglang/pull/39288",
            "https://github.com/vllm-project/vllm/pull/54568",
            "https://github.com/flashinfer-ai/flashinfer/pull/5119",
        ),
        says="a masked lane reads slot 0, which holds NaN; the sink is dropped, counted twice or overflows",
        contract="an index < 0 contributes nothing, the sink is in the denominator once, an empty row is 0 (K9)",
        check=_check_attention,
        reference=_exact,
        faults=(
            Fault("NaN times 0", "finite", _nan_leaks),
            Fault("sink dropped", "sink once", _sink_dropped),
            Fault("sink in each part", "sink once", _sink_in_each_part),
            Fault("sink inside the log-sum-exp", "lse without sink", _sink_in_lse),
            Fault("sink overflows", "finite", _sink_overflows),
        ),
    ),
)
