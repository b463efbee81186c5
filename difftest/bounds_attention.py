"""Sparse attention of rows as a ball, with bounds for what rounding does to a whole head and to its size.

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
class AttentionBall:
    """B rows [B, A heads, C]; every tensor fp64.

    out, terms [B, A, C]   with terms = sum p |v|.   lse   ball [B, A].
    variance, shift [B, A] of the head's error vector: bound of its variance (roundings independent), and of the norm of
                           what is not random.
    gain_variance, gain_shift [B, A]   the same for the error's component along out, <error, out>.
    """

    out: Ball
    terms: Tensor
    lse: Ball
    variance: Tensor
    shift: Tensor
    gain_variance: Tensor
    gain_shift: Tensor


def attention_ball(
    query: Ball, values: Tensor, count: Tensor, sink: Tensor, scale: float, declares: Declaration
) -> AttentionBall:
    """Ball of B rows' attention over their slots: query [B, A, C], values [B, S, C] of any dtype, of which the first
    `count` [B] >= 1 are a row's own and the others 0, sink [A] fp64.

    Error of a logit, u = 2^-24, v = 2^-23 (truncating accumulator): independent roundings of the dot give a deviation
    s_j = v sqrt(C) scale |q o k_j|_2, plus those of the exponential, u (4 |z_j - max| + 8) (its argument, 2^(x log2 e),
    2 ulp, the rescaling of a running maximum); truncation and scaling shift it by b_j = v (C / LANES + 8) |z_j|; query
    elements whose own rounding is unsure shift it too (`_query_effects`). A relative error e_j of exp(z_j) moves out by
    sum p_j e_j (v_j - out).
    Probabilities rounded to bf16 before the PV product (not in the sum): relative 2^-8 each, on v_j alone.
    PV sum: gamma(count + LANES) sum p |v| in any order; division, sink and rescaling 8 u |out|.
    Element bound: each e_j at lambda s_j + b_j, all others at their worst, added up.
    Slots past a row's own have z_j = 0 and p_j = 0, with which every bound weighs them.
    """
    exact = declares.attention == "fp64"
    roundoff, adder = (UNIT_FP64, UNIT_FP64) if exact else (UNIT_FP32, ACCUMULATOR)
    rounded = UNIT_BF16 if declares.probability == "bf16" else 0.0
    q, slots, width = query.mid, count[:, None].double(), values.shape[2]
    values, single = values.double(), values.float()
    size = single.abs()
    logit = q @ values.mT * scale
    lse, top, p, share = _softmax(logit, count, sink)
    out = p @ values
    below = (top[..., None] - logit).float().clamp_(min=0.0)
    noise = (q.square().float() @ size.square().mT).sqrt_().mul_(adder * width**0.5 * scale)
    noise += roundoff * (4 * below + 8)
    shift = gamma(width / LANES + 8, adder) * logit.abs().float()
    dense, sparse = _query_effects(query, values, size, p, out, share, scale)
    shift += dense
    worst = quantile() * noise + shift
    pf, share = p.float(), share.float()
    summed = rounded + gamma(slots + LANES, adder)[..., None].float()
    terms, reach = (torch.cat((pf, pf * (worst + summed)), 1) @ size).chunk(2, 1)
    relative = (pf * worst).sum(-1, keepdim=True) + 8 * roundoff
    rad = SECOND_ORDER * (reach + relative * out.abs()) + sparse.element + TINY_FP32
    lse_rad = quantile() * (share * noise).square().sum(-1).sqrt() + (share * shift).sum(-1) + sparse.lse
    lse_rad += gamma(slots / LANES + LANES, roundoff) + 4 * roundoff * (lse.abs() + top.abs() + 8)
    spread = _Spread(pf, single, slots, out, noise, shift, below, rounded, adder, declares.output == "bf16")
    return AttentionBall(
        Ball(out, rad.double()),
        terms.double(),
        Ball(lse, SECOND_ORDER * lse_rad.double()),
        spread.variance(),
        spread.shift_norm(terms) + sparse.norm,
        spread.gain_variance(),
        spread.gain_shift(terms) + sparse.along,
    )


def _softmax(logit: Tensor, count: Tensor, sink: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of the first `count` [B] logits [B, A, S] of each row: log-sum-exp and maximum [B, A], probabilities with and
    without the sink [B, A, S]."""
    foreign = torch.arange(logit.shape[2], device=count.device) >= count[:, None]
    own = logit.masked_fill(foreign[:, None], -torch.inf)
    lse, top = own.logsumexp(-1), own.amax(-1)
    p = (own - torch.logaddexp(lse, sink)[..., None]).exp_()
    return lse, top, p, own.sub_(lse[..., None]).exp_()


@dataclass(frozen=True)
class _Spread:
    """Second moments of rows' errors. probability, noise, shift, below [B, A, S] fp32; values [B, S, C] fp32; slots
    [B, 1] and out [B, A, C] fp64."""

    probability: Tensor
    values: Tensor
    slots: Tensor
    out: Tensor
    noise: Tensor
    shift: Tensor
    below: Tensor
    rounded: float
    adder: float
    output_bf16: bool

    def variance(self) -> Tensor:
        """sum p_j^2 (noise_j^2 + v^2 S) |v_j|^2, the probabilities' own roundings 2^-16 / 3 |v|^2 sum_b (sum p)^2 over
        buckets of like logits, and the output's: 2^-16 / 3 |out|^2. [B, A] fp64."""
        square = self._length.square()
        single = self.noise.square() + self.adder**2 * self.slots[..., None].float()
        total = ((self.probability.square() * single) @ square[..., None])[..., 0]
        total = total + self.rounded**2 / UNIFORM * square.amax(-1, keepdim=True) * self._bucket_squares[0]
        rounding = (self.out * self._output_unit).square().sum(-1) / UNIFORM
        summed: Tensor = rounding + total.double()
        return summed

    def shift_norm(self, terms: Tensor) -> Tensor:
        """sum p_j b_j (|v_j| + |out|) and the PV sum's truncation, [B, A] fp64."""
        lengths = self._length[:, None] + self.out.norm(dim=-1, keepdim=True).float()
        shift: Tensor = (self.probability * self.shift * lengths).sum(-1).double()
        return shift.add_(self._truncation * torch.linalg.vector_norm(terms, dim=-1))

    def gain_variance(self) -> Tensor:
        """The same along out: each slot's error weighs w_j = p_j (v_j . out), [B, A] fp64."""
        total = self._reach.square().mul_(self.noise.square()).sum(-1)
        total = total + self.rounded**2 / UNIFORM * self._bucket_squares[1]
        return total.double() + self._output_unit**2 / UNIFORM * self.out.square().square().sum(-1)

    def gain_shift(self, terms: Tensor) -> Tensor:
        total = (self._reach * self.shift).sum(-1).double()
        return total + self._truncation * (terms * self.out.abs()).sum(-1)

    @cached_property
    def _length(self) -> Tensor:
        """|v_j|, [B, S] fp32."""
        length: Tensor = torch.linalg.vector_norm(self.values, dim=-1)
        return length

    @cached_property
    def _along(self) -> Tensor:
        return self.probability * (self.out.float() @ self.values.mT)

    @cached_property
    def _reach(self) -> Tensor:
        """p_j (|v_j . out| + |out|^2), [B, A, S] fp32."""
        return self._along.abs() + self.probability * self.out.square().sum(-1, keepdim=True).float()

    @property
    def _truncation(self) -> Tensor:
        return gamma(self.slots / LANES + 2 * LANES, self.adder)

    @property
    def _output_unit(self) -> float:
        return UNIT_BF16 if self.output_bf16 else UNIT_FP32

    @cached_property
    def _bucket_squares(self) -> tuple[Tensor, Tensor]:
        """sum over buckets of (sum of weight)^2, [B, A], for the weights p_j and w_j."""
        weights = self.probability, self._along
        if not self.rounded:
            zeros = weights[0].new_zeros(weights[0].shape[:2])
            return zeros, zeros
        bucket = (self.below * BUCKETS_PER_UNIT).long().clamp_(max=BUCKETS - 1)
        empty = weights[0].new_zeros(*weights[0].shape[:2], BUCKETS)
        one, other = (empty.scatter_add(-1, bucket, weight).square_().sum(-1) for weight in weights)
        return one, other


@dataclass(frozen=True)
class _Sparse:
    """What unsure query elements followed one by one may do: to elements [B, A, C], lse, norm and gain [B, A]."""

    element: Tensor
    lse: Tensor
    norm: Tensor
    along: Tensor


def _query_effects(
    query: Ball, values: Tensor, size: Tensor, p: Tensor, out: Tensor, share: Tensor, scale: float
) -> tuple[Tensor, _Sparse]:
    """Effects of the query's own radius: (shift of every logit [B, A, S] fp32, effects followed one by one); `size` is
    |values| in fp32.

    A head with at most SPARSE uncertain elements (values on a rounding tie): element d off by r moves logit j by
    scale r k_jd, hence out by scale r sum_j p_j k_jd (v_j - out), which is computed, with its sign pattern, instead of
    bounded, and lse by scale r sum_j share_j k_jd. Any other head: |z_j| may shift by scale sum_d r_d |k_jd|.
    """
    unsure = query.rad > 0
    many = unsure.sum(-1, keepdim=True) > SPARSE
    dense = torch.zeros_like(p, dtype=torch.float32)
    if bool(many.any()):
        dense = (query.rad.masked_fill(~many, 0.0).float() @ size.mT).mul_(scale)
    row, head, dim = (unsure & ~many).nonzero(as_tuple=True)
    element, (norm, along, lse) = torch.zeros_like(out), out.new_zeros(3, *out.shape[:2])
    if len(row):
        step = SECOND_ORDER * scale * query.rad[row, head, dim]
        moved = values[row, :, dim]
        weight = p[row, head] * moved
        exact = out[row, head]
        effect = (_times_own(weight, row, values) - exact * weight.sum(-1, keepdim=True)).mul_(step[:, None])
        at = row, head
        element.index_put_(at, effect.abs(), accumulate=True)
        norm.index_put_(at, effect.norm(dim=-1), accumulate=True)
        along.index_put_(at, (effect * exact).sum(-1).abs(), accumulate=True)
        lse.index_put_(at, (share[row, head] * moved).sum(-1).abs() * step, accumulate=True)
    return dense, _Sparse(element, lse, norm, along)


def _times_own(weight: Tensor, row: Tensor, values: Tensor) -> Tensor:
    """Products of weights [N, S] with the values [B, S, C] of the row that each belongs to, `row` [N] ascending."""
    count = torch.bincount(row, minlength=len(values))
    place = torch.arange(len(row), device=row.device) - (count.cumsum(0) - count)[row]
    padded = weight.new_zeros(len(values), int(count.max()), weight.shape[1])
    padded[row, place] = weight
    return (padded @ values)[row, place]
