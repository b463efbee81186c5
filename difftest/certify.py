"""How far a score may lie from the oracle's by declared formats and arithmetic alone: eps, the width of an honest swap.

Never from measured deviations: everything here follows from the oracle's tensors and the path's `Declaration`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .ball import UNIT_FP32, quantile
from .bounds_score import score_ball
from .paths.base import Declaration, Rounding
from .reference.compressor import compressor_inputs
from .reference.formats import FORMATS, SCALINGS, quantise
from .reference.hadamard import hadamard
from .reference.indexer import head_weight
from .reference.inputs import LayerInputs
from .reference.norm import rms_norm
from .reference.rope import rope_table, rotate
from .trace import Trace

UNIFORM = 3.0
"""A rounding error spread evenly over +-b has variance b^2 / 3, and is sub-Gaussian with exactly that variance."""

ENTRIES = 2**20
"""Swapped entries over which the failure probability is shared."""

STORED_ROUNDINGS = 4
"""Traces hold fp32: a key, a query, a weight and the score are each rounded to it, whatever the arithmetic."""


def rounding_variance(x: Tensor, format_name: str) -> Tensor:
    """Variance of rounding x to a format: (half a step)^2 / 3."""
    return (FORMATS[format_name].step(x) / 2).square() / UNIFORM


def stored_variance(x: Tensor, stored: str) -> Tensor:
    """Variance of storing x [..., D] by a quantiser: a half step of the format, times the block's scale."""
    if stored == "none":
        return torch.zeros_like(x)
    if stored == "bf16":
        return rounding_variance(x, "bf16")
    scaling = SCALINGS[stored]
    _, scale = quantise(x, stored)  # type: ignore[arg-type]
    blocks = torch.unflatten(x, -1, (scale.shape[-1], -1))
    unit = scale[..., None]
    return (rounding_variance(blocks / unit, scaling.format.name) * unit.square()).flatten(-2)


def _rounded(variance: Tensor, x: Tensor, declared: str) -> Tensor:
    return variance + rounding_variance(x, "bf16") if declared == "bf16" else variance


def _turned(variance: Tensor, table: Tensor) -> Tensor:
    """Variances after a rotation: cos^2 and sin^2 of the pair's two."""
    pairs = table.shape[-1]
    turn = table.reshape(*table.shape[:-1], *(1,) * (variance.ndim - table.ndim), pairs)
    cosine, sine = turn.real.square(), turn.imag.square()
    plain = variance.shape[-1] - 2 * pairs
    a, b = torch.unflatten(variance[..., plain:], -1, (pairs, 2)).unbind(-1)
    mixed = torch.stack((a * cosine + b * sine, a * sine + b * cosine), -1).flatten(-2)
    return torch.cat((variance[..., :plain], mixed), -1)


def _finished(x: Tensor, variance: Tensor, table: Tensor, rounding: Rounding) -> tuple[Tensor, Tensor]:
    """Rotation, Hadamard (every output is the mean of the variances) and storage: (values, variances)."""
    turned = rotate(x, table)
    variance = _rounded(_turned(variance, table), turned, rounding.rotated)
    flat = hadamard(turned)
    variance = _rounded(variance.mean(-1, keepdim=True).expand_as(flat), flat, rounding.transformed)
    return flat, variance + stored_variance(flat, rounding.stored)


def key_variance(inputs: LayerInputs, pooled: Tensor, position: Tensor, rounding: Rounding) -> tuple[Tensor, Tensor]:
    """Exact index keys [m, D] and the variance of the path's, from the oracle's pooled keys [m, D] at `position` [m].

    Each declared rounding adds (half a step)^2 / 3; the norm scales variances by (weight / rms)^2, the rotation mixes
    pairs, the Hadamard transform averages a row.
    """
    config = inputs.config
    weight = compressor_inputs(inputs, "index").norm_weight
    x = pooled.double()
    gain = weight.double() * (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).rsqrt()
    variance = _rounded(torch.zeros_like(x), x, rounding.pooled) * gain.square()
    normed = rms_norm(x, weight, config.rms_norm_eps)
    variance = _rounded(variance, normed, rounding.normed)
    return _finished(normed, variance, rope_table(config, inputs.kind, position), rounding)


def query_variance(inputs: LayerInputs, rows: Tensor, rounding: Rounding) -> tuple[Tensor, Tensor]:
    """Exact index queries of `rows` [R] int64, [R, H, D] fp64, and the variance of the path's."""
    assert inputs.index_query is not None
    x = inputs.index_query[rows].double()
    table = rope_table(inputs.config, inputs.kind, inputs.row_position[rows])
    return _finished(x, torch.zeros_like(x), table, rounding)


@dataclass(frozen=True)
class Epsilon:
    """eps of some entries of each row [R, m] fp64, and its parts: `format` and `arithmetic`."""

    format: Tensor
    arithmetic: Tensor

    @property
    def total(self) -> Tensor:
        return self.format + self.arithmetic


def epsilon(inputs: LayerInputs, rows: Tensor, entries: Tensor, baseline: Trace, declares: Declaration) -> Epsilon:
    """Bound of |path's score - exact score| for `entries` [R, m] (request-relative) of `rows` [R], both int64.

    With errors dq, dk, dw of declared roundings, independent and evenly spread over their half steps, the score
    sum_h w_h relu(q_h . k) moves by sum_h w_h [q_h . k > 0] (q_h . dk + dq_h . k + dq_h . dk), and by
    sum_h dw_h relu(q_h . k).
    Its variance: sum_d G_d^2 var(k_d) with G = sum_h w_h [..] q_h; sum_h w_h^2 [..] sum_d var(q_hd) (k_d^2 + var(k_d));
    sum_h var(w_h) relu(.)^2. A head counts as active unless its dot is negative by more than lambda deviations.
    format = lambda times the deviation, failing with probability FAILURE over ENTRIES; arithmetic = the scorer's own
    bound (`bounds_score`) and the trace's fp32. Published bf16 scores add the roundings of dots and terms to the
    variance, and a half step of the sum.
    """
    level = quantile(events=ENTRIES)
    offset = torch.tensor(inputs.entry_offset, device=rows.device)[inputs.row_request[rows]]
    packed, place = (entries + offset[:, None]).unique(return_inverse=True)
    keys = key_variance(inputs, baseline.value("compressed")[packed], inputs.entry_position[packed], declares.key)
    key, var_k = (part[place] for part in keys)
    query, var_q = query_variance(inputs, rows, declares.query)
    assert inputs.index_weight is not None
    weight = head_weight(inputs.index_weight[rows], inputs.config)
    dots = query @ key.mT
    moved = var_q @ (key.square() + var_k).mT
    live = dots > -level * (moved + query.square() @ var_k.mT).sqrt()
    slope = (weight[..., None] * live).mT @ query
    variance = (slope.square() * var_k).sum(-1) + _over_heads(weight.square(), moved * live)
    if declares.weight == "bf16":
        variance = variance + _over_heads(rounding_variance(weight, "bf16"), dots.relu().square())
    part = score_ball(query, key, weight, _plain_score(declares))
    arithmetic = part.rad + STORED_ROUNDINGS * UNIT_FP32 * part.terms
    if declares.score_rounds == "bf16":
        variance = variance + _over_heads(weight.square(), rounding_variance(dots, "bf16") * live)
        variance = variance + (rounding_variance(weight[..., None] * dots, "bf16") * live).sum(1)
        arithmetic = arithmetic + FORMATS["bf16"].step(part.mid) / 2
    return Epsilon(level * variance.sqrt(), arithmetic)


def _over_heads(factor: Tensor, terms: Tensor) -> Tensor:
    """sum_h factor_h terms_h of factor [R, H], terms [R, H, m]: [R, m]."""
    return (factor[:, None] @ terms)[:, 0]


def _plain_score(declares: Declaration) -> Declaration:
    """The same sums without the bf16 roundings, which `epsilon` counts one by one."""
    return Declaration(score="fp32" if declares.score == "bf16" else declares.score)
