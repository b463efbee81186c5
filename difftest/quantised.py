"""Judges stored codes: in units of the path's own scale, and the scale by itself.

A scale that is off by a rounding moves every code of its block by the same tiny factor. Dividing the exact value by the
scale that the path itself stored takes that factor out, so a code may differ only where the exact quotient lies within
its radius of a tie.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .ball import SECOND_ORDER, UNIT_FP32, Ball, distance_to, nearest
from .metrics import excess_of
from .reference.formats import FORMATS, SCALINGS, Scaling, decode_e2m1, decode_e4m3fn, dequantise, pow2_ceil

SCALE_ROUNDINGS = 3
"""fp32 roundings behind a scale or a quotient: amax times the rounded reciprocal of the largest code (2, or one
division), and the product with the rounded reciprocal of the scale (2); one more for an approximate reciprocal. The
quotient by a power of two is exact."""


@dataclass(frozen=True)
class Codes:
    """Codes of one piece in units of their block's own scale, [n, D] fp64, and the blocks' scales [n, blocks]."""

    format: str
    got: Tensor
    ball: Ball
    scale: Tensor
    scale_ball: Ball
    scale_want: Tensor
    scale_excess: Tensor
    off_grid: Tensor


def is_quantised(stored: str) -> bool:
    """Whether a quantiser stores codes with scales, rather than numbers as they are."""
    return stored in SCALINGS


def scale_ball(ball: Ball, scaling: Scaling) -> Ball:
    """Scale max(floor, amax) / format.max before its own rounding, [n, blocks, ...] from blocks [..., block].

    amax lies between the largest |mid| - rad and the largest |mid| + rad of its block.
    """
    size = ball.mid.abs()
    middle = size.amax(-1).clamp(min=scaling.floor)
    high = (size + ball.rad).amax(-1).clamp(min=scaling.floor)
    low = (size - ball.rad).amax(-1).clamp(min=scaling.floor)
    rad = torch.maximum(high - middle, middle - low) + SECOND_ORDER * SCALE_ROUNDINGS * UNIT_FP32 * middle
    return Ball(middle / scaling.format.max, rad / scaling.format.max)


def scale_distance(ball: Ball, got: Tensor, scaling: Scaling) -> Tensor:
    """How far the exact scale lies from those that round to `got` (fp32, or up to a power of two)."""
    if scaling.round is not pow2_ceil:
        return distance_to("fp32", ball.mid, got)
    distance = torch.maximum(got / 2 - ball.mid, ball.mid - got).clamp(min=0.0)
    return torch.where(
        (got > 0) & (pow2_ceil(got.clamp(min=torch.finfo(torch.float64).tiny)) == got), distance, torch.inf
    )


def _own_scale(value: Tensor, ball: Ball, scaling: Scaling) -> Tensor:
    """The scale a path used, from its dequantised blocks [..., block], where it did not hand it out.

    Raw scale: the largest code of a block is always format.max, so the scale is amax / format.max (or the floor's).
    Power of two: the exact one, or its neighbour where the exact scale is within its radius of a power of two; of the
    two the coarser if every value lies on its grid.
    """
    if scaling.round is not pow2_ceil:
        floored = ball.mid <= scaling.floor / scaling.format.max
        return torch.where(floored, ball.mid, value.abs().amax(-1) / scaling.format.max)
    low, high = (pow2_ceil((ball.mid + sign * ball.rad).clamp(min=torch.finfo(torch.float64).tiny)) for sign in (-1, 1))
    if bool((low == high).all()):
        return high
    codes = value / high[..., None]
    fits = (nearest(scaling.format.name, codes) == codes).all(-1)
    return torch.where(fits, high, low)


def judge_codes(quantiser: str, value: Tensor, ball: Ball, scale: Tensor | None) -> Codes:
    """Codes and scales of one piece against the ball before quantisation.

    value [n, D] fp64 as the path dequantised it (code * scale, rounded to fp32); ball [n, D]; scale [n, blocks] as the
    path stored it, or None.
    """
    scaling = SCALINGS[quantiser]
    block = min(scaling.block, value.shape[-1])
    values = torch.unflatten(value, -1, (-1, block))
    blocks = Ball(torch.unflatten(ball.mid, -1, (-1, block)), torch.unflatten(ball.rad, -1, (-1, block)))
    wanted = scale_ball(blocks, scaling)
    own = _own_scale(values, wanted, scaling) if scale is None else scale.double()
    bad = excess_of(scale_distance(wanted, own, scaling), wanted.rad.nan_to_num(nan=torch.inf, posinf=torch.inf))
    unit = torch.where((own > 0) & own.isfinite(), own, wanted.mid)[..., None]
    quotient = values / unit
    codes = nearest(scaling.format.name, quotient)
    off_grid = (quotient - codes).abs() > 2 * UNIT_FP32 * codes.abs()
    exact = blocks.mid / unit
    inexact = 0.0 if scaling.round is pow2_ceil else SECOND_ORDER * SCALE_ROUNDINGS * UNIT_FP32
    rad = (blocks.rad / unit + inexact * exact.abs()).flatten(-2)
    return Codes(
        scaling.format.name,
        codes.flatten(-2),
        Ball(exact.flatten(-2), rad),
        own,
        wanted,
        scaling.round(wanted.mid),
        bad,
        off_grid.flatten(-2),
    )


def code_values(quantiser: str, codes: Tensor, scale: Tensor) -> Tensor:
    """Values that stored bytes stand for: decoded code * scale of its block, fp64 [n, D]."""
    decode = decode_e4m3fn if SCALINGS[quantiser].format is FORMATS["e4m3fn"] else decode_e2m1
    return dequantise(decode(codes), scale)
