"""Index scores as balls: what the scorer's declared arithmetic may add to sum_h w_h relu(q_h . k)."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .ball import LANES, SECOND_ORDER, TINY_FP32, UNIT_FP64, gamma, quantile
from .paths.base import Declaration
from .reference.chunks import slices
from .reference.inputs import LayerInputs

ACCUMULATOR = 2.0**-23
"""Relative error of one addition in a tensor core's fp32 accumulator, which truncates: twice that of rounding."""

WGMMA_BITS = 13
"""Bits below the leading one that Hopper's fp8 tensor core keeps of every addend (about 14 significant bits in all;
deepseek-v4-facts, difference 22), so addends are truncated to multiples of 2^-13 of the largest one's power of two."""

WGMMA_K = 32
"""Products one fp8 tensor-core instruction adds at a time, with its accumulator: 33 addends."""

CHUNK_BYTES = {"cpu": 2**20, "cuda": 2**28}
"""Bytes of the per-head products held at a time, in fp64: on a CPU few enough to stay in a core's cache, on a GPU so
many that starting kernels costs no time of its own."""


@dataclass(frozen=True)
class ScoreBall:
    """Scores of rows against entries before the last rounding, each [R, E] fp64.

    terms      sum over heads of |w| relu(q . k), the unit of score errors.
    rad        bound of every element.
    variance   of an element's error, bounded under the model that single roundings are independent; `bias` bounds
               the part that is not.
    """

    mid: Tensor
    rad: Tensor
    terms: Tensor
    variance: Tensor
    bias: Tensor


Chunk = Callable[[Tensor, Tensor, Tensor], ScoreBall]
"""q [r, H, D], k [e, D] or [r, e, D], w [r, H], fp64 -> ScoreBall [r, e]."""


def score_ball(q: Tensor, k: Tensor, w: Tensor, declares: Declaration) -> ScoreBall:
    """Ball of the scores of q [R, H, D], k [E, D], w [R, H] as the path stored them, any float dtype. k [R, E, D] gives
    every row entries of its own.

    fp32, the smaller of two bounds. In the worst case each dot errs by gamma(D + 4) sum_i |q_i k_i| in any order (4:
    the dequantised values the judge reads are themselves rounded products code * scale), with the unit v = 2^-23 of a
    truncating accumulator; relu is 1-Lipschitz, so the sum over heads errs by sum_h |w_h| of that, plus gamma(H + 6)
    T, T = sum_h |w_h| relu(q_h . k), for weights (folding a query scale in and out: 3), products and additions.
    sum_h |w_h| sum_i |q_hi| |k_i| is one product of [R, D] by [D, E].
    In the usual case roundings are independent: each is at most v times a partial sum, and partial sums of a dot are of
    the size of its norm |x|, x_i = q_i k_i, so the dot errs with variance v^2 D |x|^2 and the score with
    sum_h w_h^2 of that, times lambda for FAILURE over EVENTS; truncation always goes towards zero, which adds a bias of
    v a step, and a tensor core adds LANES products or more in one: gamma((D + H) / LANES + 8) T.
    The fp8 tensor core and the published bf16 roundings add to this: `_wgmma`, `_rounded_heads`.
    """
    if declares.score_rounds == "bf16":
        return _chunked(q, k, w, _rounded_heads)
    if declares.score == "fp8_wgmma":
        return _chunked(q, k, w, _wgmma)
    return _chunked(q, k, w, _fp64_heads if declares.score == "fp64" else _fp32_heads)


def _chunked(q: Tensor, k: Tensor, w: Tensor, one: Chunk) -> ScoreBall:
    shape = (q.shape[0], k.shape[-2])
    out = ScoreBall(*(torch.zeros(shape, dtype=torch.float64, device=q.device) for _ in range(5)))
    queries, weights = q.double(), w.double()
    chunk = CHUNK_BYTES[q.device.type]
    columns = max(64, chunk // (8 * max(1, q.shape[0] * q.shape[1])))
    rows = max(1, chunk // (8 * q.shape[1] * columns))
    for right in slices(k.shape[-2], 1, columns):
        keys = k[..., right, :].double()
        for left in slices(q.shape[0], 1, rows):
            part = one(queries[left], keys if k.ndim == 2 else keys[left], weights[left])
            for name in ("mid", "rad", "terms", "variance", "bias"):
                getattr(out, name)[left, right] = getattr(part, name)
    return out


def _dots(q: Tensor, k: Tensor) -> Tensor:
    """Products of q [r, H, D] with k [e, D] or [r, e, D], [r, H, e]."""
    return q @ k.mT if k.ndim == 3 else torch.unflatten(q.flatten(0, 1) @ k.T, 0, q.shape[:2])


def _signed_and_absolute(products: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """sum_h w_h p_h and sum_h |w_h| p_h of products [r, H, e] >= 0: two [r, e]."""
    both = torch.stack((w, w.abs()), 1) @ products
    return both[:, 0], both[:, 1]


def _floating(q: Tensor, k: Tensor, w: Tensor, roundoff: float, representation: int) -> ScoreBall:
    heads, dim = q.shape[1:]
    mid, terms = _signed_and_absolute(_dots(q, k).relu_(), w)
    reach = (w.abs()[:, None] @ q.abs() @ k.abs().mT)[:, 0]
    spread = (w.square()[:, None] @ q.square() @ k.square().mT)[:, 0]
    rad = gamma(dim + representation, roundoff) * reach + gamma(heads + 6, roundoff) * terms
    bias = gamma((dim + heads) / LANES + 8, roundoff) * terms
    variance = roundoff**2 * dim * spread
    rad = torch.minimum(rad, quantile() * variance.sqrt() + bias)
    return ScoreBall(mid, SECOND_ORDER * rad + TINY_FP32, terms, variance, bias)


def _fp64_heads(q: Tensor, k: Tensor, w: Tensor) -> ScoreBall:
    return _floating(q, k, w, UNIT_FP64, 0)


def _fp32_heads(q: Tensor, k: Tensor, w: Tensor) -> ScoreBall:
    return _floating(q, k, w, ACCUMULATOR, 4)


def _wgmma(q: Tensor, k: Tensor, w: Tensor) -> ScoreBall:
    """fp8 tensor core: D / 32 instructions, each adding 32 exact products x_i and the accumulator.

    Every addend is cut towards zero to a multiple of g = 2^-13 times the power of two of the largest one, so it loses
    t_i in [0, g) with g <= 2^-13 M, M^2 <= sum_i x_i^2 + max(a, a')^2 (a, a': accumulator before and after, both
    computed exactly here). A step errs by -sum_i s_i t_i, s_i the signs. With c = sum_i s_i it splits into
    -c mean(t), at most |c| g / 2 for fractions spread over [0, g), and a sum over signs balanced around their mean,
    which Hoeffding bounds with 33 g^2 / 4 (Serfling: fixed sums, exchangeable fractions). Over heads and steps
    (Cauchy-Schwarz, a head whose dot is so negative that no such error lifts it contributes nothing):
        rad = lambda sqrt(33 / 4 S) + 1 / 2 sqrt(S C),  S = sum w_h^2 g^2,  C = sum (|c| + 1)^2.
    c comes from the product of the sign matrices. What fp32 does with the dots afterwards is added as in fp32.
    """
    grid, addends = 2.0**-WGMMA_BITS, WGMMA_K + 1
    steps = -(-q.shape[2] // WGMMA_K)
    dots = _dots(q, k)
    reach = (grid * addends * steps) * (q.norm(dim=2)[:, :, None] * k.norm(dim=-1)[..., None, :]).float()
    live = dots.float() > -reach
    weight = w.square()[:, None].float()
    peaks, tilt = _wgmma_steps(q.float(), k.float())
    squares = (weight @ peaks.mul_(live)).double() + weight.double() @ q.square() @ k.square().mT
    squares = SECOND_ORDER * grid**2 * squares[:, 0]
    mid, terms = _signed_and_absolute(dots.relu_(), w)
    after = gamma(q.shape[1] + 10, ACCUMULATOR) * terms
    bias = (squares * tilt.mul_(live).sum(1).double()).sqrt() / 2 + after
    spread = quantile() * (addends / 4 * squares).sqrt()
    return ScoreBall(mid, SECOND_ORDER * (spread + bias) + TINY_FP32, terms, addends / 4 * squares, bias)


def _wgmma_steps(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Over the instructions of each dot, q [r, H, D], k [.., e, D] fp32: sum of max(a, a')^2, and of (|c| + 1)^2,
    [r, H, e] fp32."""
    signs_q, signs_k = q.sign(), k.sign()
    total = peaks = tilt = before = torch.zeros((), device=q.device)
    for step in slices(q.shape[2], 1, WGMMA_K):
        total = total + _dots(q[..., step], k[..., step])
        square = total.square()
        peaks = peaks + torch.maximum(before, square)
        tilt = tilt + _dots(signs_q[..., step], signs_k[..., step]).abs_().add_(1).square_()
        before = square
    return peaks, tilt


def _rounded_heads(q: Tensor, k: Tensor, w: Tensor) -> ScoreBall:
    """The published scores: q . k to bf16 per head, relu, times w to bf16, summed in fp32 (and to bf16 at the end).

    The dot carries its fp32 error (`score_ball`, the usual case) into its rounding; where both ends of that ball round
    alike, the rounded dot is known. Its product with a bf16 weight is exact in fp32, so the next rounding is known too;
    elsewhere the term may be off by |w| times the dot's ambiguity, rounded: at most one more step, 2^-7 of the larger
    term.
    """
    dots = _dots(q, k)
    exact = dots.float()
    size = _dots(q.square().float(), k.square().float()).sqrt_()
    reach = size * (SECOND_ORDER * quantile() * ACCUMULATOR * q.shape[2] ** 0.5)
    reach += SECOND_ORDER * gamma(q.shape[2] / LANES + 4, ACCUMULATOR) * exact.abs()
    rounded = dots.bfloat16().float().relu_()
    high, low = (exact + reach).bfloat16().float().relu_(), (exact - reach).bfloat16().float().relu_()
    weight = w.float()[..., None]
    term = (rounded * weight).bfloat16().double()
    apart = torch.maximum(high - rounded, rounded - low) * weight.abs()
    unsure = torch.where(apart > 0, apart + 2.0**-7 * (high * weight).abs(), 0.0)
    terms = term.abs().sum(1)
    doubt = unsure.double().sum(1)
    rad = doubt + gamma(q.shape[1], ACCUMULATOR) * terms
    return ScoreBall(term.sum(1), SECOND_ORDER * rad, terms, torch.zeros_like(rad), rad)


def requests(inputs: LayerInputs) -> Iterator[tuple[Tensor, slice, int]]:
    """Rows of every request that has any: (rows int64 [r], packed entries slice, most visible entries)."""
    visible = inputs.visible
    for request in range(len(inputs.lengths)):
        rows = (inputs.row_request == request).nonzero()[:, 0]
        if len(rows):
            count = int(visible[rows].max())
            first = inputs.entry_offset[request]
            yield rows, slice(first, first + count), count


def score_layer_ball(inputs: LayerInputs, q: Tensor, k: Tensor, w: Tensor, declares: Declaration) -> ScoreBall:
    """`score_ball` of a layer's rows against their own request's entries, [R, max visible]; zeros past `visible`."""
    visible = inputs.visible
    width = int(visible.max()) if len(visible) else 0
    shape = (len(visible), width)
    out = ScoreBall(*(torch.zeros(shape, dtype=torch.float64, device=q.device) for _ in range(5)))
    for rows, entries, count in requests(inputs):
        part = score_ball(q[rows], k[entries], w[rows], declares)
        for name in ("mid", "rad", "terms", "variance", "bias"):
            getattr(out, name)[rows, :count] = getattr(part, name)
    hidden = torch.arange(width, device=q.device) >= visible[:, None]
    for name in ("mid", "rad", "terms", "variance", "bias"):
        getattr(out, name).masked_fill_(hidden, 0.0)
    return out
