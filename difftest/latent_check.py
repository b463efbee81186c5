"""The isolated check of stage `kv`: window and compressed latents as attention reads them."""

from collections.abc import Iterator

from torch import Tensor

from . import bounds, findings
from .ball import Ball
from .measured import Measured, entry_locator, plain, stride
from .metrics import Locate, Tally
from .paths.base import Declaration, Quantiser
from .quantised import is_quantised
from .record import Finding
from .reference.compressor import compressor_inputs
from .reference.inputs import LayerInputs
from .stored_check import QuantisedJudge
from .trace import Trace

PIECE = 512
"""Latents judged at a time."""


def check_latents(inputs: LayerInputs, trace: Trace, declares: Declaration) -> Measured:
    """Judges the latents' dims without RoPE in their declared format and the RoPE dims in theirs.

    A compressed latent is judged from the main compressor's inputs: stage `kv` reads no other stage, so the pooling's
    own error bound is part of the radius.
    """
    tensors = trace["kv"]
    window, compressed = WindowPieces(inputs, declares), CompressedPieces(inputs, declares)
    bad = findings.not_finite("kv.window", tensors["window"], window.locate)
    bad += findings.not_finite("kv.compressed", tensors["compressed"], compressed.locate)
    if bad:
        return Measured(findings=bad)
    parts = {
        "window": _check("window", declares.window.stored, tensors["window"], window),
        "compressed": _check("compressed", declares.latent.stored, tensors["compressed"], compressed),
    }
    return _joined(parts)


class WindowPieces:
    """The balls of window latents, piece by piece."""

    def __init__(self, inputs: LayerInputs, declares: Declaration) -> None:
        self.inputs, self.declares = inputs, declares
        self.tail = declares.rope_tail.stored

    def locate(self, index: tuple[int, ...]) -> dict[str, int]:
        request, token = (int(part[index[0]]) for part in (self.inputs.window_request, self.inputs.window_position))
        return {"request": request, "token": token, "dim": index[1]}

    def __iter__(self) -> Iterator[tuple[slice, Ball, Ball]]:
        kv, position = self.inputs.window_kv, self.inputs.window_position
        for start in range(0, len(kv), PIECE):
            rows = slice(start, min(start + PIECE, len(kv)))
            weight = self.inputs.kv_norm_weight
            source = Ball.exact(kv[rows])
            yield rows, *bounds.latent(self.inputs, source, weight, position[rows], self.declares, window=True)


class CompressedPieces:
    """The balls of compressed latents, piece by piece: pooled, then prepared."""

    def __init__(self, inputs: LayerInputs, declares: Declaration) -> None:
        self.inputs, self.declares = inputs, declares
        self.tail = declares.rope_tail.stored
        self.locate: Locate = entry_locator(inputs)

    def __iter__(self) -> Iterator[tuple[slice, Ball, Ball]]:
        inputs, declares = self.inputs, self.declares
        if inputs.main is None:
            return
        weight, position = compressor_inputs(inputs, "main").norm_weight, inputs.entry_position
        elements = inputs.entry_offset[-1] * inputs.config.head_dim
        for rows, pooled in bounds.pooled(inputs, "main", declares.pool, stride(elements)):
            yield rows, *bounds.latent(inputs, pooled, weight, position[rows], declares, window=False)


def _check(name: str, stored: Quantiser, value: Tensor, pieces: WindowPieces | CompressedPieces) -> list[Measured]:
    """Judges one tensor of the stage: [dims without RoPE, RoPE dims]."""
    plain_dims = pieces.inputs.config.head_dim - pieces.inputs.config.qk_rope_head_dim

    def locate_tail(index: tuple[int, ...]) -> dict[str, int]:
        return pieces.locate((index[0], index[1] + plain_dims))

    tail = Tally("bf16" if pieces.tail == "bf16" else "fp32", locate_tail)
    judge = QuantisedJudge(f"kv.{name}", stored, pieces.locate) if is_quantised(stored) else None
    flat = Tally("bf16" if stored == "bf16" else "fp32", pieces.locate)
    coarse: list[Finding] = []
    for rows, nope, rope in pieces:
        got = value[rows].double()
        tail.add(got[:, plain_dims:], rope, rows.start)
        if judge:
            judge.add(got[:, :plain_dims], nope, None, rows.start)
        else:
            flat.add(got[:, :plain_dims], nope, rows.start)
        if not coarse and tail.format == "fp32":
            coarse = findings.granularity(f"kv.{name}", got[:, plain_dims:], rope.mid)
        if not coarse and not judge and flat.format == "fp32":
            coarse = findings.granularity(f"kv.{name}", got[:, :plain_dims], nope.mid)
    first = judge.measured() if judge else plain(flat, "error norm / norm")
    first.findings += coarse
    return [first, plain(tail, "error norm / norm")]


def _joined(parts: dict[str, list[Measured]]) -> Measured:
    """One record of both tensors: the largest of every metric and bound; shares are the smallest."""
    every = [measured for pair in parts.values() for measured in pair]
    worst = max(every, key=lambda measured: measured.metrics["excess"])
    joined = Measured({}, {"excess": 1.0}, [], worst.worst, "", dict(worst.facts))
    for name, pair in parts.items():
        for metric in ("codes_equal", "code_distance", "scale_error", "relative_error"):
            values = [measured.metrics[metric] for measured in pair if metric in measured.metrics]
            if values:
                joined.metrics[f"{name}_{metric}"] = min(values) if metric == "codes_equal" else max(values)
    joined.metrics["excess"] = worst.metrics["excess"]
    judged = [measured for measured in every if measured.facts["judged"]]
    joined.metrics["equal"] = min((measured.metrics["equal"] for measured in judged), default=1.0)
    codes = [measured for measured in judged if "code_distance" in measured.metrics]
    shown = codes or judged
    joined.metrics["deviation"] = max((measured.metrics["deviation"] for measured in shown), default=0.0)
    joined.bounds["deviation"] = max((measured.bounds["deviation"] for measured in shown), default=0.0)
    joined.facts["unit"] = "codes or ULP" if codes else "error norm / norm"
    joined.facts["judged"] = sum(measured.facts["judged"] for measured in every)
    unjudged = sum(measured.facts.get("unjudged", 0) for measured in every)
    if unjudged:
        joined.facts["unjudged"] = unjudged
    for measured in every:
        joined.findings += measured.findings
    return joined
