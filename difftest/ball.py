"""Ball arithmetic: a midpoint and a radius, both fp64, carried through a stage with the path's own rounding points.

A ball stands for every value that a correct implementation may hold. `mid` is the exact value, `rad` bounds what the
declared arithmetic may add. All bounds are first order in the unit roundoff and inflated by `SECOND_ORDER`.
"""

import math
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from .paths.base import Arithmetic, Round
from .reference.formats import FORMATS, round_bf16
from .reference.hadamard import hadamard as exact_hadamard
from .reference.norm import rms_norm as exact_rms_norm
from .reference.rope import rotate as exact_rotate

UNIT_FP32 = 2.0**-24
UNIT_FP64 = 2.0**-53
UNIT_BF16 = 2.0**-8
"""Largest relative error of one rounding to nearest: 2^-p for p significant bits (24, 53, 8)."""

SECOND_ORDER = 1.01
"""Inflation that covers the products of errors which first-order bounds leave out (each below 1 % here)."""

TINY_FP32 = 2.0**-126
"""Smallest normal fp32: results below it may be flushed to zero, an absolute error."""

LANES = 8
"""Partial sums that every implementation keeps at least when it adds the squares of a row: the longest chain of fp32
additions is then n / LANES plus the tree over the lanes. A warp has 32, a SIMD register 8; a single scalar chain of
512 additions would be slower than the layer itself."""


FAILURE = 1e-12
"""Probability with which a correct implementation may exceed a statistical bound, over a whole tensor."""

EVENTS = 2**30
"""Elements over which FAILURE is shared: 1,024 rows of a million entries."""


Number = TypeVar("Number", float, Tensor)


def unit(arithmetic: Arithmetic) -> float:
    """Unit roundoff of sums and products: 2^-53 for `fp64`, 2^-24 for all others, whose scalars live in fp32."""
    return UNIT_FP64 if arithmetic == "fp64" else UNIT_FP32


def gamma(count: Number, roundoff: float) -> Number:
    """Relative bound of `count` successive roundings (Higham, Accuracy and Stability, lemma 3.1): n u / (1 - n u)."""
    return count * roundoff / (1 - count * roundoff)


def quantile(failure: float = FAILURE, events: int = EVENTS) -> float:
    """lambda with P(|X| > lambda s for any of `events` sums X) <= failure, X of sub-Gaussian scale s: Hoeffding's bound
    2 exp(-lambda^2 / 2) for each."""
    return math.sqrt(2 * math.log(2 * events / failure))


@dataclass(frozen=True)
class Ball:
    """Midpoint and radius, fp64 tensors of one shape."""

    mid: Tensor
    rad: Tensor

    @classmethod
    def exact(cls, value: Tensor) -> "Ball":
        """A value known exactly (an input, or a tensor the path itself stored)."""
        exact = value.double()
        return cls(exact, torch.zeros_like(exact))

    def relative(self, error: float | Tensor) -> "Ball":
        """The same ball after a further relative error."""
        return Ball(self.mid, self.rad + error * (self.mid.abs() + self.rad))

    def __getitem__(self, index: object) -> "Ball":
        return Ball(self.mid[index], self.rad[index])  # type: ignore[index]


NEAREST_DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16, "e4m3fn": torch.float8_e4m3fn}


def nearest(format_name: str, exact: Tensor) -> Tensor:
    """`exact` (fp64) rounded to a format, by torch's cast where it has one: quick, and right up to a double rounding.

    The cast goes through fp32, so a value within 2^-25 of a tie may land on its other side. That is far below any
    radius this module produces; `distance_to` settles every element that matters with the exact preimage.
    """
    dtype = NEAREST_DTYPE.get(format_name)
    if dtype is None:
        return FORMATS[format_name].round(exact)
    limited = exact.clamp(-FORMATS[format_name].max, FORMATS[format_name].max) if format_name == "e4m3fn" else exact
    return limited.float().to(dtype).double()


def round_to(ball: Ball, declared: Round) -> Ball:
    """A declared rounding point: (R(mid), max |R(mid +- rad) - R(mid)|).

    R is monotone, so every value of the ball rounds into that interval. Away from a tie all three roundings agree and
    the radius becomes exactly 0: what came before is forgotten, as in the path itself.
    """
    if declared == "none":
        return ball
    mid = nearest("bf16", ball.mid)
    if not bool(ball.rad.any()):
        return Ball(mid, ball.rad)
    up, down = nearest("bf16", ball.mid + ball.rad) - mid, mid - nearest("bf16", ball.mid - ball.rad)
    return Ball(mid, torch.maximum(up, down))


def rms_norm(x: Ball, weight: Tensor | None, eps: float, roundoff: float) -> Ball:
    """RMSNorm y = w x r, r = (mean(x^2) + eps)^-1/2, of x [..., D].

    Arithmetic: n / LANES + LANES additions in the sum, one square, one division by D and one addition of eps make
    relative errors of the mean; the square root halves them. rsqrt is right to 2 ulp = 4 u; two products follow. So
    |dy| <= ((D / LANES + LANES + 3) / 2 + 6) u |y|.
    Input: |dx| moves y by |w| r |dx|, and r by (1 - q)^-1/2 - 1 with q = mean(2 |x| |dx| + dx^2) / (mean + eps).
    A row whose sum of squares overflows fp32 has radius infinity: it is not judged, and counted as such.
    """
    width = x.mid.shape[-1]
    mid = exact_rms_norm(x.mid, weight, eps)
    own = (gamma(width / LANES + LANES + 3, roundoff) / 2 + gamma(6, roundoff)) * SECOND_ORDER
    rad = own * mid.abs()
    if bool(x.rad.any()):
        mean = x.mid.square().mean(-1, keepdim=True) + eps
        change = (2 * x.mid.abs() * x.rad + x.rad.square()).mean(-1, keepdim=True) / mean
        factor = (1 - change.clamp(max=0.5)).rsqrt()
        gain = factor * mean.rsqrt() * (1 if weight is None else weight.double().abs())
        rad = rad + SECOND_ORDER * gain * x.rad + (factor - 1) * mid.abs()
    return Ball(mid, (rad + TINY_FP32).masked_fill_(_overflows(x.mid, roundoff), torch.inf))


def _overflows(x: Tensor, roundoff: float) -> Tensor:
    """Rows whose sum of squares leaves the range of fp32, [..., 1] bool: nothing can be said about their norm."""
    limit = FORMATS["fp32"].max if roundoff == UNIT_FP32 else torch.finfo(torch.float64).max
    return x.square().sum(-1, keepdim=True) > limit


def rotate(x: Ball, table: Tensor, roundoff: float) -> Ball:
    """RoPE of the last dims by a table of unit complex numbers.

    (a + ib)(c + is): two products and a sum are 2 u (|a c| + |b s|); the table is published in fp32, and a path that
    makes its own may miss each entry by 2 ulp of 1 (2^-23 each). With |c|, |s| <= 1 the error is at most
    6 u (|a| + |b|). Input: |da| |c| + |db| |s|.
    """
    mid = exact_rotate(x.mid, table)
    pairs = table.shape[-1]
    plain = x.mid.shape[-1] - 2 * pairs
    turn = table.reshape(*table.shape[:-1], *(1,) * (x.mid.ndim - table.ndim), pairs)
    size = torch.unflatten(x.mid[..., plain:].abs(), -1, (pairs, 2)).sum(-1, keepdim=True)
    error = (6 * roundoff * SECOND_ORDER * size).expand(*size.shape[:-1], 2).flatten(-2)
    if bool(x.rad.any()):
        a, b = torch.unflatten(x.rad[..., plain:], -1, (pairs, 2)).unbind(-1)
        c, s = turn.real.abs(), turn.imag.abs()
        error = error + torch.stack((a * c + b * s, a * s + b * c), -1).flatten(-2)
    return Ball(mid, torch.cat((x.rad[..., :plain], error), -1))


def hadamard(x: Ball, roundoff: float) -> Ball:
    """Orthonormal Hadamard transform of D values, y = D^-1/2 sum(+-x).

    Additions in any order (butterflies make 7, a product with the +-1 matrix up to D), one product with a rounded
    constant. Worst case gamma(D + 2) D^-1/2 sum|x|. Usual case: each addition errs independently by at most u times a
    partial sum, and partial sums are of the size of |x|_2, so the deviation is u sqrt(D) |x|_2 D^-1/2, times lambda
    (`quantile`), plus gamma(LANES) |y|. The smaller of both. Input: D^-1/2 sum|dx|.
    """
    width = x.mid.shape[-1]
    mid = exact_hadamard(x.mid)
    worst = gamma(width + 2, roundoff) * width**-0.5 * x.mid.abs().sum(-1, keepdim=True)
    usual = quantile() * roundoff * x.mid.norm(dim=-1, keepdim=True) + gamma(LANES, roundoff) * mid.abs()
    rad = SECOND_ORDER * torch.minimum(worst, usual)
    if bool(x.rad.any()):
        rad = rad + SECOND_ORDER * width**-0.5 * x.rad.sum(-1, keepdim=True)
    return Ball(mid, rad)


def published_query_norm(q: Tensor, eps: float) -> Ball:
    """The published per-head query norm, q * rsqrt(mean(q^2) + eps) on bf16 tensors: every operation rounds to bf16.

    q bf16 [..., C]. The square of a bf16 number is exact in fp32, so its rounding is known; the mean carries
    (C / LANES + LANES + 1) u of fp32 before its rounding; rsqrt 2 ulp before its own; the product is exact in fp32.
    """
    exact = q.double()
    squares = round_bf16(exact.square())
    width = q.shape[-1]
    mean = Ball.exact(squares.mean(-1, keepdim=True)).relative(gamma(width / LANES + LANES + 1, UNIT_FP32))
    mean = round_to(mean, "bf16")
    shifted = round_to(Ball(mean.mid + eps, mean.rad).relative(2 * UNIT_FP32), "bf16")
    root = shifted.mid.rsqrt()
    spread = (shifted.mid - shifted.rad).clamp(min=TINY_FP32).rsqrt() - root
    scale = round_to(Ball(root, spread).relative(4 * UNIT_FP32), "bf16")
    return round_to(Ball(exact * scale.mid, exact.abs() * scale.rad), "bf16")


def distance_to(format_name: str, exact: Tensor, got: Tensor) -> Tensor:
    """How far the exact value lies from the interval that rounds to `got`: 0 inside, infinite if `got` is no such
    number.

    exact, got fp64 of one shape. Only elements that differ from the rounded exact value are examined.
    """
    off = nearest(format_name, exact) != got
    return torch.zeros_like(exact).masked_scatter_(off, distance_off(format_name, exact[off], got[off]))


def distance_off(format_name: str, exact: Tensor, got: Tensor) -> Tensor:
    """`distance_to` of elements that are known to differ from the rounded exact value."""
    low, high = FORMATS[format_name].preimage(got)
    return torch.maximum(low - exact, exact - high).clamp_(min=0.0).nan_to_num_(nan=torch.inf, posinf=torch.inf)
