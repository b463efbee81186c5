"""Sparse attention of one row as a ball, with bounds for what rounding does to a whole head and to its size.

Notation, for one row and head: slots j with logits z_j = scale q . k_j, values v_j = k_j [C], probabilities
p_j = exp(z_j) / (sum exp(z) + exp(sink)), out = sum p_j v_j.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .ball import LANES, SECOND_ORDER, TINY_FP32, UNIT_BF16, UNIT_FP32, UNIT_FP64, Ball, gamma, quantile
from .bounds_score import ACCUMULATOR
from .paths.base import Declaration

UNIFORM = 3.0
"""A rounding error spread evenly over +-b has variance b^2 / 3, and is sub-Gaussian with exactly that."""

SPARSE = 64
"""Query elements of a head that may sit on a rounding tie and are still followed one by one."""

BUCKETS_PER_UNIT = 256
BUCKETS = 16 * BUCKETS_PER_UNIT
"""Logits closer than 1 / 256 give probabilities within one bf16 step, whose roundings may go the same way together;
beyond 16 below the maximum all share one bucket (their probability is below 1e-7)."""


@dataclass(frozen=True)
class RowBall:
    """One row [A heads, C]; every tensor fp64.

    out, terms [A, C]   with terms = sum p |v|.   lse   ball [A].
    variance, shift [A] of the head's error vector: bound of its variance (roundings independent), and of the norm of
                        what is not random.
    gain_variance, gain_shift [A]   the same for the error's component along out, <error, out>.
    """

    out: Ball
    terms: Tensor
    lse: Ball
    variance: Tensor
    shift: Tensor
    gain_variance: Tensor
    gain_shift: Tensor


def row_ball(query: Ball, values: Tensor, sink: Tensor, scale: float, declares: Declaration) -> RowBall:
    """Ball of one row's attention over its valid slots: query [A, C], values [S, C] fp64 with S >= 1, sink [A] fp64.

    Error of a logit, u = 2^-24, v = 2^-23 (truncating accumulator): independent roundings of the dot give a deviation
    s_j = v sqrt(C) scale |q o k_j|_2, plus those of the exponential, u (4 |z_j - max| + 8) (its argument, 2^(x log2 e),
    2 ulp, the rescaling of a running maximum); truncation and scaling shift it by b_j = v (C / LANES + 8) |z_j|; query
    elements whose own rounding is unsure shift it too (`_query_effects`). A relative error e_j of exp(z_j) moves out by
    sum p_j e_j (v_j - out).
    Probabilities rounded to bf16 before the PV product (not in the sum): relative 2^-8 each, on v_j alone.
    PV sum: gamma(S + LANES) sum p |v| in any order; division, sink and rescaling 8 u |out|.
    Element bound: each e_j at lambda s_j + b_j, all others at their worst, added up.
    """
    exact = declares.attention == "fp64"
    roundoff, adder = (UNIT_FP64, UNIT_FP64) if exact else (UNIT_FP32, ACCUMULATOR)
    rounded = UNIT_BF16 if declares.probability == "bf16" else 0.0
    q, slots, width = query.mid, len(values), values.shape[1]
    logit = q @ values.T * scale
    lse = logit.logsumexp(-1)
    p = (logit - torch.logaddexp(lse, sink)[:, None]).exp()
    out = p @ values
    size = values.abs().float()
    below = (logit.amax(-1, keepdim=True) - logit).float()
    noise = (q.square().float() @ size.square().T).sqrt_() * (adder * width**0.5 * scale)
    noise += roundoff * (4 * below + 8)
    shift = gamma(width / LANES + 8, adder) * logit.abs().float()
    dense, sparse = _query_effects(query, values, p, out, lse, logit, scale)
    shift += dense
    single = quantile() * noise + shift
    pf = p.float()
    terms, reach = torch.stack((pf, pf * (single + rounded + gamma(slots + LANES, adder)))) @ size
    own = (pf * single).sum(-1, keepdim=True) + 8 * roundoff
    rad = SECOND_ORDER * (reach + own * out.abs()) + sparse.element + TINY_FP32
    share = (logit - lse[:, None]).exp().float()
    lse_rad = quantile() * (share * noise).square().sum(-1).sqrt() + (share * shift).sum(-1) + sparse.lse
    lse_rad += gamma(slots / LANES + LANES, roundoff) + 4 * roundoff * (lse.abs() + logit.amax(-1).abs() + 8)
    spread = _Spread(pf, values, out, noise, shift, below, rounded, adder, declares.output == "bf16")
    return RowBall(
        Ball(out, rad.double()),
        terms.double(),
        Ball(lse, SECOND_ORDER * lse_rad.double()),
        spread.variance(),
        spread.shift_norm(terms) + sparse.norm,
        spread.gain_variance(),
        spread.gain_shift(terms) + sparse.along,
    )


@dataclass(frozen=True)
class _Spread:
    """Second moments of one row's errors. probability, noise, shift, below [A, S] fp32; values [S, C]; out [A, C]."""

    probability: Tensor
    values: Tensor
    out: Tensor
    noise: Tensor
    shift: Tensor
    below: Tensor
    rounded: float
    adder: float
    output_bf16: bool

    def variance(self) -> Tensor:
        """sum p_j^2 (noise_j^2 + v^2 S) |v_j|^2, the probabilities' own roundings 2^-16 / 3 |v|^2 sum_b (sum p)^2 over
        buckets of like logits, and the output's: 2^-16 / 3 |out|^2. [A] fp64."""
        square = self.values.square().sum(-1).float()
        slots = len(self.values)
        total = (self.probability.square() * (self.noise.square() + self.adder**2 * slots)) @ square
        total = total + self.rounded**2 / UNIFORM * square.amax() * self._bucket_squares(self.probability)
        rounding = (self.out * self._output_unit).square().sum(-1) / UNIFORM
        summed: Tensor = rounding + total.double()
        return summed

    def shift_norm(self, terms: Tensor) -> Tensor:
        """sum p_j b_j (|v_j| + |out|) and the PV sum's truncation, [A] fp64."""
        lengths = self.values.norm(dim=-1).float() + self.out.norm(dim=-1, keepdim=True).float()
        shift: Tensor = (self.probability * self.shift * lengths).sum(-1).double()
        return shift.add_(self._truncation * torch.linalg.vector_norm(terms, dim=-1))

    def gain_variance(self) -> Tensor:
        """The same along out: each slot's error weighs w_j = p_j (v_j . out), [A] fp64."""
        along = self._along
        total = (along.abs() + self._own).square().mul(self.noise.square()).sum(-1)
        total = total + self.rounded**2 / UNIFORM * self._bucket_squares(along)
        return total.double() + self._output_unit**2 / UNIFORM * self.out.square().square().sum(-1)

    def gain_shift(self, terms: Tensor) -> Tensor:
        total = ((self._along.abs() + self._own) * self.shift).sum(-1).double()
        return total + self._truncation * (terms * self.out.abs()).sum(-1)

    @cached_property
    def _along(self) -> Tensor:
        return self.probability * (self.out.float() @ self.values.T.float())

    @property
    def _own(self) -> Tensor:
        return self.probability * self.out.square().sum(-1, keepdim=True).float()

    @property
    def _truncation(self) -> float:
        return gamma(len(self.values) / LANES + 2 * LANES, self.adder)

    @property
    def _output_unit(self) -> float:
        return UNIT_BF16 if self.output_bf16 else UNIT_FP32

    def _bucket_squares(self, weight: Tensor) -> Tensor:
        """sum over buckets of (sum of weight)^2, [A]."""
        if not self.rounded:
            return torch.zeros(len(weight), device=weight.device)
        bucket = (self.below * BUCKETS_PER_UNIT).long().clamp(max=BUCKETS - 1)
        sums = torch.zeros(len(weight), BUCKETS, device=weight.device).scatter_add_(1, bucket, weight)
        return sums.square().sum(-1)


@dataclass(frozen=True)
class _Sparse:
    """What unsure query elements followed one by one may do: to elements [A, C], lse, norm and gain [A]."""

    element: Tensor
    lse: Tensor
    norm: Tensor
    along: Tensor


def _query_effects(
    query: Ball, values: Tensor, p: Tensor, out: Tensor, lse: Tensor, logit: Tensor, scale: float
) -> tuple[Tensor, _Sparse]:
    """Effects of the query's own radius: (shift of every logit [A, S], effects followed one by one).

    A head with at most SPARSE uncertain elements (values on a rounding tie): element d off by r moves logit j by
    scale r k_jd, hence out by scale r sum_j p_j k_jd (v_j - out), which is computed, with its sign pattern, instead of
    bounded. Any other head: |z_j| may shift by scale sum_d r_d |k_jd|.
    """
    unsure = query.rad > 0
    many = unsure.sum(-1) > SPARSE
    dense = torch.zeros_like(logit, dtype=torch.float32)
    if bool(many.any()):
        dense[many] = (query.rad[many] @ values.abs().T * scale).float()
    head, dim = (unsure & ~many[:, None]).nonzero(as_tuple=True)
    element, zeros = torch.zeros_like(out), torch.zeros_like(lse)
    norm, along, shift_lse = zeros, zeros.clone(), zeros.clone()
    if len(head):
        size = SECOND_ORDER * scale * query.rad[head, dim]
        moved = values.T[dim]
        weight = p[head] * moved
        effect = (weight @ values - out[head] * weight.sum(-1, keepdim=True)).mul_(size[:, None])
        element = element.index_add(0, head, effect.abs())
        norm = norm.index_add(0, head, effect.norm(dim=-1))
        along = along.index_add(0, head, (effect * out[head]).sum(-1).abs())
        share = (logit - lse[:, None]).exp()[head]
        shift_lse = shift_lse.index_add(0, head, (share * moved).sum(-1).abs() * size)
    return dense, _Sparse(element, shift_lse, norm, along)
