"""The isolated check: does this stage compute what it declares, on the path's own upstream tensors?"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from . import bounds, findings
from .attention_check import check_attention
from .ball import UNIT_FP32, Ball, quantile
from .bounds_score import score_layer_ball
from .latent_check import check_latents
from .measured import Measured, entry_locator, named, plain, stride
from .metrics import Tally
from .paths.base import Declaration
from .record import Finding, Record
from .reference.chunks import slices
from .reference.inputs import LayerInputs
from .selection import Selection, exactness, structure
from .stages import STAGES, StageName
from .stored_check import check_stored
from .trace import Trace

AGAINST = "exact stage"
PIECE = 1024
"""Entries of index_k judged at a time."""
QUERY_ROWS = {"cpu": 8, "cuda": 256}
"""Rows of index_q judged at a time: on a CPU few enough for a core's cache."""


def check_isolated(stage: StageName, inputs: LayerInputs, trace: Trace, declares: Declaration) -> Record:
    """Judges one stage of a trace against its exact version, fed with the trace's own upstream tensors.

    The record's `excess` is the factor by which the derived bound would have to grow for every element to pass (at most
    1 passes); `deviation` is in the stage's own unit, named in `facts`. Findings are structural faults. A stage whose
    inputs or upstream tensors are not finite is skipped, naming tensor and position: the fault is not this stage's.
    """
    measured = _blocked(stage, inputs, trace) or CHECKS[stage](inputs, trace, declares)
    return Record(
        case=trace.case,
        layer=trace.layer,
        kind=inputs.kind,
        path=trace.path,
        stage=stage,
        comparison="isolated",
        against=AGAINST,
        metrics=measured.metrics,
        bounds=measured.bounds,
        findings=measured.findings,
        worst=measured.worst,
        skipped=measured.skipped,
        facts={"format": declared_format(stage, declares), **measured.facts},
    )


def declared_format(stage: StageName, declares: Declaration) -> str:
    """The number format a stage declares for what it stores, as people call it; "fp32" where nothing is rounded."""
    score = declares.score if declares.score_rounds == "none" else "bf16"
    latents = dict.fromkeys((declares.window.stored, declares.latent.stored))
    formats: dict[StageName, str] = {
        "compressed": declares.pool,
        "index_k": declares.key.stored,
        "index_q": declares.query.stored,
        "head_weight": declares.weight,
        "score": score,
        "topk": "none",
        "kv": " and ".join(latents),
        "attention": declares.probability,
    }
    return formats[stage].replace("none", "fp32")


def _blocked(stage: StageName, inputs: LayerInputs, trace: Trace) -> Measured | None:
    """A skip or findings that leave nothing to measure; None when the stage can be measured."""
    fault = findings.input_fault(stage, inputs)
    if fault:
        return Measured(skipped=fault)
    for upstream in STAGES[stage].reads:
        if upstream not in trace or stage == "topk":
            continue
        for name in STAGES[upstream].tensors:
            bad = findings.not_finite(f"{upstream}.{name}", trace[upstream][name])
            if bad:
                return Measured(skipped=f"upstream {bad[0].message}")
    want = expected_shapes(stage, inputs)
    wrong = [
        found for name, shape in want.items() for found in findings.wrong_shape(stage, name, trace[stage][name], shape)
    ]
    return Measured(findings=wrong) if wrong else None


def expected_shapes(stage: StageName, inputs: LayerInputs) -> dict[str, tuple[int, ...]]:
    """Contract shapes of a stage's tensors for these inputs."""
    config, rows, entries = inputs.config, len(inputs.row_position), inputs.entry_offset[-1]
    heads, dim = config.index_n_heads, config.index_head_dim
    width = int(inputs.visible.max()) if rows else 0
    attention = (rows, config.num_attention_heads)
    table: dict[StageName, dict[str, tuple[int, ...]]] = {
        "compressed": {"value": (entries, dim)},
        "index_k": {"value": (entries, dim)},
        "index_q": {"value": (rows, heads, dim)},
        "head_weight": {"value": (rows, heads)},
        "score": {"value": (rows, width)},
        "topk": {"value": (rows, config.index_topk)},
        "kv": {"window": (len(inputs.window_kv), config.head_dim), "compressed": (entries, config.head_dim)},
        "attention": {"value": (*attention, config.head_dim), "lse": attention},
    }
    return table[stage]


def _compressed(inputs: LayerInputs, trace: Trace, declares: Declaration) -> Measured:
    value = trace.value("compressed")
    bad = findings.not_finite("compressed", value, entry_locator(inputs))
    if bad:
        return Measured(findings=bad)
    tally = Tally("fp32", entry_locator(inputs))
    coarse: list[Finding] = []
    for rows, ball in bounds.pooled(inputs, "index", declares.pool, stride(value.numel())):
        got = value[rows].double()
        tally.add(got, ball, rows.start)
        if not coarse and bool(ball.rad.any()):
            coarse = findings.granularity("compressed", got, ball.mid)
    measured = plain(tally, "error norm / norm")
    measured.findings += coarse
    return measured


def _index_k(inputs: LayerInputs, trace: Trace, declares: Declaration) -> Measured:
    pooled = trace.value("compressed")
    parts = list(slices(len(pooled), 1, PIECE))
    parts = parts[:-1][:: stride(pooled.numel())] + parts[-1:]
    pieces = ((part, bounds.index_key(inputs, pooled[part], part, declares)) for part in parts)
    return check_stored("index_k", declares.key.stored, trace["index_k"], entry_locator(inputs), pieces)


def _index_q(inputs: LayerInputs, trace: Trace, declares: Declaration) -> Measured:
    parts = slices(len(inputs.row_position), 1, QUERY_ROWS[trace.value("index_q").device.type])
    pieces = ((part, bounds.index_query(inputs, part, declares)) for part in parts)
    return check_stored("index_q", declares.query.stored, trace["index_q"], named("row", "head", "dim"), pieces)


def _head_weight(inputs: LayerInputs, trace: Trace, declares: Declaration) -> Measured:
    locate = named("row", "head")
    value = trace.value("head_weight")
    bad = findings.not_finite("head_weight", value, locate)
    if bad:
        return Measured(findings=bad)
    ball = bounds.head_weight(inputs, declares)
    tally = Tally("bf16" if declares.weight == "bf16" else "fp32", locate)
    tally.add(value.double(), ball)
    measured = plain(tally, "error norm / norm")
    if declares.weight == "none":
        measured.findings += findings.granularity("head_weight", value.double(), ball.mid)
    return measured


def _score(inputs: LayerInputs, trace: Trace, declares: Declaration) -> Measured:
    got, visible = trace.value("score"), inputs.visible
    shown = torch.arange(got.shape[1], device=got.device) < visible[:, None]
    locate = named("row", "entry")
    bad = findings.not_finite("score", got.masked_fill(~shown, 0.0), locate) + findings.unmasked(got, visible)
    if bad:
        return Measured(findings=bad)
    q, k, w = (trace.value(stage) for stage in ("index_q", "index_k", "head_weight"))
    ball = score_layer_ball(inputs, q, k, w, declares)
    index = shown.nonzero()
    tally = Tally(
        "bf16" if declares.score_rounds == "bf16" else "fp32",
        lambda at: {"row": int(index[at[0], 0]), "entry": int(index[at[0], 1])},
    )
    values = got.double()
    tally.add(values[shown], Ball(ball.mid[shown], ball.rad[shown]), terms=ball.terms[shown])
    metrics = {
        "excess": tally.excess,
        "deviation": tally.deviation,
        "rms": tally.rms_over_terms,
        "equal": tally.equal_share,
        "max_error": tally.largest_error,
    }
    limits = {"excess": 1.0, "deviation": tally.deviation_allowed}
    found = findings.constant_rows(got, ball.mid, visible)
    if declares.score_rounds == "none":
        limits["rms"] = _rms_bound(ball.variance[shown], ball.bias[shown], ball.mid[shown], ball.terms[shown], len(got))
        coarse = findings.BF16_BITS if declares.score == "fp8_wgmma" else findings.COARSE_BITS
        found += findings.granularity("score", values[shown], ball.mid[shown], coarse)
    facts = {"unit": "error / sum|terms|", "judged": tally.elements}
    return Measured(metrics, limits, found, tally.worst, "", facts)


def _rms_bound(variance: Tensor, bias: Tensor, mid: Tensor, terms: Tensor, rows: int) -> float:
    """Bound of the root mean square score error, over that of sum|terms|, failing with probability FAILURE.

    Errors are bias + noise of the given variance + the last fp32 rounding. The norm of the noise exceeds its root mean
    square by more than a factor 1 + lambda / sqrt(n) with that probability, n the independent directions; rows at least
    are independent, so n = rows.
    """
    size = math.sqrt(float(terms.square().sum()))
    if not size:
        return torch.inf
    noise = math.sqrt(float(variance.sum())) * (1 + quantile(events=1) / math.sqrt(max(1, rows)))
    rounding = UNIT_FP32 * math.sqrt(float(mid.square().sum()))
    return (math.sqrt(float(bias.square().sum())) + noise + rounding) / size


def _topk(inputs: LayerInputs, trace: Trace, declares: Declaration) -> Measured:
    chosen = trace.value("topk")
    selection = Selection(chosen, trace.value("score"), inputs.visible)
    slots = trace["topk"].get("slots")
    found = structure(selection, slots, _entry_slots(inputs) if slots is not None else None)
    exact = exactness(selection)
    exercised = int(selection.exercised.sum())
    found += exact.findings
    measured = Measured(
        metrics={
            "excess": torch.inf if exact.findings else 0.0,
            "deviation": float(exact.wrong_rows.sum()),
            "score_gap": exact.largest_gap,
            "rows": float(len(chosen)),
            "rows_exercised": float(exercised),
        },
        bounds={"excess": 1.0, "deviation": 0.0},
        findings=found,
        facts={"unit": "rows not the top k of their scores"},
    )
    if not exercised and not found:
        measured.skipped = "selection not exercised"
        longest = int(inputs.visible.max()) if len(chosen) else 0
        measured.facts["why"] = f"the longest row has {longest} visible entries and k is {selection.k}"
    return measured


def _entry_slots(inputs: LayerInputs) -> Tensor:
    """Pool slot of each row's entries, [R, max visible]; -1 past its request's entries."""
    slots, offset = inputs.entry_slot, inputs.entry_offset
    width = int(inputs.visible.max())
    out = torch.full((len(inputs.row_position), width), -1, dtype=torch.int64, device=slots.device)
    for row, request in enumerate(inputs.row_request.tolist()):
        count = min(width, inputs.entries[request])
        out[row, :count] = slots[offset[request] : offset[request] + count]
    return out


CHECKS: dict[StageName, Callable[[LayerInputs, Trace, Declaration], Measured]] = {
    "compressed": _compressed,
    "index_k": _index_k,
    "index_q": _index_q,
    "head_weight": _head_weight,
    "score": _score,
    "topk": _topk,
    "kv": check_latents,
    "attention": check_attention,
}
