"""The accumulated comparison: how far a path's chained result is from a baseline's (the oracle's, unless told)."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from . import findings
from .accumulated_attention import attention_change, lost_mass
from .accumulated_topk import compare_selection
from .ball import UNIT_BF16
from .measured import Measured
from .paths.base import Declaration, Quantiser
from .record import Finding, Record
from .reference.chunks import slices
from .reference.formats import SCALINGS, dequantise, quantise
from .reference.indexer import score_layer, score_magnitude_layer
from .reference.inputs import LayerInputs
from .stages import STAGES, StageName
from .trace import Trace

CHUNK_BYTES = 64 * 2**20
"""Bytes of one fp64 temporary."""

PROBE_ROWS = 8
"""Rows on which the share of each upstream stage in the score error is measured."""

UNIFORM_SCALE = UNIT_BF16
"""Smallest common factor worth reporting: a single rounding to bf16 moves no value further."""


def check_accumulated(
    stage: StageName, inputs: LayerInputs, trace: Trace, baseline: Trace, declares: Declaration
) -> Record:
    """Measures one stage of a trace against the same stage of `baseline`, each with its own upstream.

    These are quality figures: format and arithmetic of everything upstream show in them. Only the certified selection
    has a bound: a swapped entry whose score is further from the cut than the declared formats explain.
    """
    fault = _fault(stage, inputs, trace, baseline)
    measured = Measured(skipped=fault) if fault else _measure(stage, inputs, trace, baseline, declares)
    return Record(
        case=trace.case,
        layer=trace.layer,
        kind=inputs.kind,
        path=trace.path,
        stage=stage,
        comparison="accumulated",
        against=baseline.path,
        metrics=measured.metrics,
        bounds=measured.bounds,
        findings=measured.findings,
        worst=measured.worst,
        skipped=measured.skipped,
        facts=measured.facts,
    )


def _fault(stage: StageName, inputs: LayerInputs, trace: Trace, baseline: Trace) -> str:
    """Why the stage cannot be compared, or ""."""
    for owner in (trace, baseline):
        for name in STAGES[stage].tensors:
            if name not in owner[stage]:
                return f"{owner.path} has no {stage}.{name}"
            tensor = owner[stage][name]
            if tensor.shape != baseline[stage][name].shape:
                want = list(baseline[stage][name].shape)
                return f"{owner.path} has {stage}.{name} {list(tensor.shape)}, {baseline.path} has {want}"
            masked = tensor
            if stage == "score":
                hidden = torch.arange(tensor.shape[1], device=tensor.device) >= inputs.visible[:, None]
                masked = tensor.masked_fill(hidden, 0.0)
            elif name == "lse":
                masked = tensor.masked_fill(tensor == -torch.inf, 0.0)
            bad = findings.not_finite(f"{owner.path} {stage}.{name}", masked) if masked.is_floating_point() else []
            if bad:
                return bad[0].message
    return ""


def _measure(stage: StageName, inputs: LayerInputs, trace: Trace, baseline: Trace, declares: Declaration) -> Measured:
    if stage == "score":
        return _score(inputs, trace, baseline, declares)
    if stage == "topk":
        measured = compare_selection(inputs, trace, baseline, declares)
        measured.metrics |= lost_mass(inputs, trace, baseline)
        return measured
    if stage == "attention":
        return Measured(attention_change(inputs, trace, baseline), facts={"unit": "norm of change / norm"})
    return _tensors(stage, trace, baseline)


def _tensors(stage: StageName, trace: Trace, baseline: Trace) -> Measured:
    """Relative error, largest error and common factor of every tensor of the stage; the largest counts."""
    metrics: dict[str, float] = {}
    for name in STAGES[stage].tensors:
        error, largest, factor = change(trace[stage][name], baseline[stage][name])
        prefix = "" if name == "value" else f"{name}_"
        metrics |= {f"{prefix}relative_error": error, f"{prefix}max_error": largest, f"{prefix}scale_factor": factor}
    if "relative_error" not in metrics:
        metrics["relative_error"] = max(value for name, value in metrics.items() if name.endswith("relative_error"))
    return Measured(metrics, facts={"unit": "error norm / norm"})


def change(got: Tensor, want: Tensor) -> tuple[float, float, float]:
    """(norm of the difference over the norm, largest difference, least-squares factor of got on want), in chunks."""
    square = norm = product = largest = 0.0
    row_bytes = 8 * max(1, got[:1].numel())
    for part in slices(len(got), row_bytes, CHUNK_BYTES):
        a, b = got[part].double(), want[part].double()
        error = a - b
        square, norm = square + float(error.square().sum()), norm + float(b.square().sum())
        product += float((a * b).sum())
        largest = max(largest, float(error.abs().max()))
    relative = (square / norm) ** 0.5 if norm else square**0.5
    return relative, largest, product / norm if norm else 1.0


def _score(inputs: LayerInputs, trace: Trace, baseline: Trace, declares: Declaration) -> Measured:
    """Score error over sum|terms|, split into format and arithmetic, with the share of every upstream stage."""
    shown = torch.arange(trace.value("score").shape[1], device=inputs.visible.device) < inputs.visible[:, None]
    if not bool(shown.any()):
        return Measured(skipped="no row has a visible entry")
    got, want = trace.value("score").double()[shown], baseline.value("score").double()[shown]
    terms = score_magnitude_layer(inputs, *_scorer_reads(baseline))[shown]
    exact = score_layer(inputs, *_scorer_reads(trace))[shown]
    size = float(terms.norm())
    error = (got - want).abs()
    live = terms > 0
    metrics = {
        "error": float(error.norm()) / size if size else 0.0,
        "max_error": float((error[live] / terms[live]).max()) if bool(live.any()) else 0.0,
        "arithmetic_error": float((got - exact).norm()) / size if size else 0.0,
        "format_error": float((exact - want).norm()) / size if size else 0.0,
    }
    metrics |= _shares(inputs, trace, baseline)
    metrics["scale_factor"], found = _common_factor(got, want)
    if found:
        _, found = _common_factor(got, want, _format_factor(inputs, baseline, declares, shown))
    return Measured(metrics, findings=found, facts={"unit": "error / sum|terms|"})


def _scorer_reads(trace: Trace) -> tuple[Tensor, Tensor, Tensor]:
    return trace.value("index_q"), trace.value("index_k"), trace.value("head_weight")


def _common_factor(got: Tensor, want: Tensor, expected: float = 1.0) -> tuple[float, list[Finding]]:
    """Least-squares factor of the scores on the baseline's, and a finding when it explains most of the error.

    Recall is blind to a common factor (a missing n_heads^-1/2, the other E4M3 flavour), so it is looked for here: the
    factor counts when its distance from `expected` moves scores further than twice what is left after it is taken out.
    """
    norm = float(want.square().sum())
    factor = float((got * want).sum()) / norm if norm else 1.0
    left = float((got - factor * want).norm())
    if abs(factor - expected) <= UNIFORM_SCALE or abs(factor - expected) * norm**0.5 <= 2 * left:
        return factor, []
    return factor, [Finding("uniform_scale", f"scores are {factor:.6g} times the baseline's, which recall cannot see")]


def _format_factor(inputs: LayerInputs, baseline: Trace, declares: Declaration, shown: Tensor) -> float:
    """The common factor that the declared formats alone leave on the baseline's scores.

    Keys that are nearly one key are rounded alike, so a coarse format scales all their scores. It is made again here:
    the baseline's keys, queries and weights rounded to the declared formats, and exact scores of them.
    """
    query = _as_stored(baseline.value("index_q"), declares.query.stored)
    key = _as_stored(baseline.value("index_k"), declares.key.stored)
    weight = _as_stored(baseline.value("head_weight"), declares.weight)
    got, want = score_layer(inputs, query, key, weight)[shown], baseline.value("score").double()[shown]
    return float((got * want).sum()) / float(want.square().sum())


def _as_stored(x: Tensor, stored: Quantiser) -> Tensor:
    """x [..., D] as a format holds it, fp64; as it is where a shrunk D leaves no whole block."""
    block = SCALINGS[stored].block if stored in SCALINGS else 1
    return dequantise(*quantise(x, stored)) if x.shape[-1] % block == 0 else x.double()


def _shares(inputs: LayerInputs, trace: Trace, baseline: Trace) -> dict[str, float]:
    """Score error, over sum|terms|, with one stage's tensors from the path and the others from the baseline."""
    count = len(inputs.row_position)
    number = min(PROBE_ROWS, count)
    picked = torch.arange(number, device=inputs.row_position.device) * count // number
    probe = replace(inputs, row_request=inputs.row_request[picked], row_position=inputs.row_position[picked])
    visible = probe.visible
    if not int(visible.max()):
        return {}
    shown = torch.arange(int(visible.max()), device=visible.device) < visible[:, None]

    def reads(taken: str) -> tuple[Tensor, Tensor, Tensor]:
        source: dict[str, Any] = {stage: (trace if stage == taken else baseline) for stage in SHARED}
        q, k, w = (source[stage].value(stage) for stage in SHARED)
        return q[picked], k, w[picked]

    want = score_layer(probe, *reads(""))[shown]
    size = float(score_magnitude_layer(probe, *reads(""))[shown].norm())
    if not size:
        return {}
    return {
        f"format_{stage}": float((score_layer(probe, *reads(stage))[shown] - want).norm()) / size for stage in SHARED
    }


SHARED: tuple[StageName, ...] = ("index_q", "index_k", "head_weight")
"""What the scorer reads, in the order of its arguments."""
