"""What a correct stage may hold, element by element, for a script that has torch alone.

The isolated check asks whether a value lies in [Round(exact - rad), Round(exact + rad)]; here those ends are written
out as tensors, in the stored format. Consumed by bundles.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from .. import bounds
from ..attention_check import error_norm_bound, row_balls
from ..ball import SECOND_ORDER, UNIT_FP32, Ball, quantile
from ..bounds_score import score_layer_ball
from ..latent_check import CompressedPieces, WindowPieces
from ..metrics import FP64_SLACK
from ..paths.base import Declaration
from ..quantised import SCALE_ROUNDINGS, is_quantised, scale_ball
from ..record import Record
from ..reference.formats import FORMATS, SCALINGS, pow2_ceil
from ..reference.inputs import LayerInputs
from ..trace import StageTensors, Trace

READBACK = 4 * UNIT_FP32
"""A dequantised value is a code times a scale, rounded to fp32; the script takes the scale out again."""

Limits = dict[str, Tensor]
"""`NAME.exact`, `NAME.low`, `NAME.high` of every tensor of the stage; `NAME.unit` where it holds codes times a scale
(NaN for dims that do not);
`limit.RULE` for rules about a whole row, head or tensor: the largest error norm, or projection, that passes."""


def limits_of(record: Record, inputs: LayerInputs, trace: Trace, declares: Declaration) -> Limits:
    """Limits of an isolated record's stage, on the trace's own upstream tensors; empty for `topk`, which is judged by
    rules alone."""
    stage = record.stage
    if stage == "compressed":
        pieces = bounds.pooled(inputs, "index", declares.pool)
        return _plain("value", _joined((ball for _, ball in pieces), inputs.config.index_head_dim), "none")
    if stage == "index_k":
        entries = slice(0, inputs.entry_offset[-1])
        ball = bounds.index_key(inputs, trace.value("compressed"), entries, declares)
        return _stored("value", ball, declares.key.stored)
    if stage == "index_q":
        rows = slice(0, len(inputs.row_position))
        return _stored("value", bounds.index_query(inputs, rows, declares), declares.query.stored)
    if stage == "head_weight":
        return _plain("value", bounds.head_weight(inputs, declares), declares.weight)
    if stage == "score":
        return _score(record, inputs, trace, declares)
    if stage == "kv":
        return _latents(inputs, declares)
    return _attention(inputs, trace, declares) if stage == "attention" else {}


def _joined(balls: Iterable[Ball], width: int) -> Ball:
    parts = list(balls) or [Ball.exact(torch.empty(0, width))]
    return Ball(torch.cat([ball.mid for ball in parts]), torch.cat([ball.rad for ball in parts]))


def _plain(name: str, ball: Ball, rounding: str) -> Limits:
    """Limits of numbers stored as they are: bf16, or fp32."""
    format_ = FORMATS["bf16" if rounding == "bf16" else "fp32"]
    rad = (ball.rad * (1 + FP64_SLACK)).nan_to_num(nan=math.inf, posinf=math.inf)
    low, high = (format_.round(ball.mid + sign * rad) for sign in (-1, 1))
    return {f"{name}.exact": ball.mid, f"{name}.low": low, f"{name}.high": high}


def _stored(name: str, ball: Ball, stored: str) -> Limits:
    """Limits in a stored format. Codes are compared in units of the exact scale, and the scale by itself.

    A power-of-two scale is exact, but may be one of two where the exact one is within its radius of a power of two:
    then what passes under either passes. A raw scale is not, and moves every quotient by its own radius.
    """
    if not is_quantised(stored):
        return _plain(name, ball, stored)
    scaling = SCALINGS[stored]
    block = min(scaling.block, ball.mid.shape[-1])
    blocks = Ball(torch.unflatten(ball.mid, -1, (-1, block)), torch.unflatten(ball.rad, -1, (-1, block)))
    wanted = scale_ball(blocks, scaling)
    ends = {end: scaling.round(wanted.mid + sign * wanted.rad) for end, sign in (("low", -1), ("high", 1))}
    unit = scaling.round(wanted.mid).repeat_interleave(block, -1)
    units, inexact = [unit], SECOND_ORDER * SCALE_ROUNDINGS * UNIT_FP32 + (wanted.rad / wanted.mid)
    if scaling.round is pow2_ceil:
        units, inexact = [end.repeat_interleave(block, -1) for end in ends.values()], torch.zeros_like(wanted.mid)
    low, high = [], []
    for one in units:
        quotient = ball.mid / one
        rad = ball.rad / one + inexact.repeat_interleave(block, -1) * quotient.abs()
        low.append(scaling.format.round(quotient - rad) * one)
        high.append(scaling.format.round(quotient + rad) * one)
    least, most = torch.stack(low).amin(0), torch.stack(high).amax(0)
    found = {f"{name}.exact": ball.mid, f"{name}.unit": unit, "scale.exact": wanted.mid}
    found |= {f"{name}.low": least - READBACK * least.abs(), f"{name}.high": most + READBACK * most.abs()}
    return found | {f"scale.{end}": scale for end, scale in ends.items()}


def _score(record: Record, inputs: LayerInputs, trace: Trace, declares: Declaration) -> Limits:
    query, key, weight = trace.value("index_q"), trace.value("index_k"), trace.value("head_weight")
    ball = score_layer_ball(inputs, query, key, weight, declares)
    shown = torch.arange(ball.mid.shape[1]) < inputs.visible[:, None]
    made = _plain("value", Ball(ball.mid, ball.rad), declares.score_rounds)
    found = {name: tensor.masked_fill(~shown, -math.inf) for name, tensor in made.items()}
    if "rms" in record.bounds:
        found["limit.rms"] = record.bounds["rms"] * ball.terms[shown].norm()[None]
    return found


def _latents(inputs: LayerInputs, declares: Declaration) -> Limits:
    found: Limits = {}
    parts = (
        ("window", WindowPieces(inputs, declares), declares.window.stored),
        ("compressed", CompressedPieces(inputs, declares), declares.latent.stored),
    )
    rope = inputs.config.qk_rope_head_dim
    for name, pieces, stored in parts:
        both = [(nope, tail) for _, nope, tail in pieces]
        flat = _stored(name, _joined((nope for nope, _ in both), inputs.config.head_dim - rope), stored)
        turned = _plain(name, _joined((tail for _, tail in both), rope), declares.rope_tail.stored)
        found |= {f"{name}.{end}": torch.cat((flat[f"{name}.{end}"], turned[f"{name}.{end}"]), -1) for end in ENDS}
        if f"{name}.unit" in flat:
            plain = torch.full_like(turned[f"{name}.exact"], math.nan)
            found[f"{name}.unit"] = torch.cat((flat[f"{name}.unit"], plain), -1)
    return found


ENDS = ("exact", "low", "high")


def _attention(inputs: LayerInputs, trace: Trace, declares: Declaration) -> Limits:
    """Limits of output and log-sum-exp; `limit.row_rms` [R], `limit.gain` [A] and `limit.gain_all` as the check has
    them, times the size of the exact output, so that they bound error norms and projections as they are."""
    count, heads, width = len(inputs.row_position), inputs.config.num_attention_heads, inputs.config.head_dim
    value, sums = Ball.exact(torch.zeros(count, heads, width)), Ball.exact(torch.full((count, heads), -math.inf))
    row_limit = torch.zeros(count, dtype=torch.float64)
    variance, shift = torch.zeros(heads, dtype=torch.float64), torch.zeros(heads, dtype=torch.float64)
    for rows, ball in row_balls(inputs, trace, declares):
        if ball is None:
            continue
        value.mid[rows], value.rad[rows] = ball.out.mid, ball.out.rad
        sums.mid[rows], sums.rad[rows] = ball.lse.mid, ball.lse.rad
        row_limit[rows] = error_norm_bound(ball)
        variance, shift = variance + ball.gain_variance.sum(0), shift + ball.gain_shift.sum(0)
    return {
        **_plain("value", value, declares.output),
        **_plain("lse", sums, "none"),
        "limit.row_rms": row_limit,
        "limit.gain": quantile() * variance.sqrt() + shift,
        "limit.gain_all": (quantile() * variance.sum().sqrt() + shift.sum())[None],
    }


def outside(tensors: StageTensors, limits: Limits) -> bool:
    """Whether an element of a stage's tensors is outside its limits, as the script's element check has it."""
    for name in (key.removesuffix(".low") for key in limits if key.endswith(".low")):
        if name in tensors:
            x, low, high = tensors[name].double().cpu(), limits[f"{name}.low"], limits[f"{name}.high"]
            if f"{name}.unit" in limits and "scale" in tensors:
                scale = tensors["scale"].double().cpu()
                x = x / scale.repeat_interleave(x.shape[-1] // scale.shape[-1], -1) * limits[f"{name}.unit"]
            if x.shape != low.shape or bool(((x < low) | (x > high) | x.isnan()).any()):
                return True
    return False
