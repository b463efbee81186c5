"""DeepSeek's own arithmetic, as published: fp32 operations with every bf16, FP4 and FP8 rounding point of `model.py`.

Follows `inference/model.py` and `inference/kernel.py` of the published checkpoint, on whole tensors instead of modules.
Shares nothing with the fp64 functions but the rotation table. Tensors that the published code holds in bf16 are bf16
here.
"""

from typing import Literal

import torch
from torch import Tensor

from .chunks import MAX_BYTES, slices

FakeQuant = Literal["published", "intended"]
"""`published`: the KV fake quantisation rounds to bf16 and so changes nothing. `intended`: it rounds to e4m3."""

FP4_BLOCK, FP4_MAX = 32, 6.0
FP4_FLOOR = FP4_MAX * 2.0**-126
"""fp4_act_quant of `kernel.py`: values per scale, largest value, floor of amax."""

FP8_BLOCK, FP8_MAX = 64, 448.0
FP8_FLOOR = 1e-4
"""act_quant of `kernel.py` as the KV cache calls it."""

FP32_FRACTION = 23
FP32_FRACTION_MASK = (1 << FP32_FRACTION) - 1

ATTENTION_BLOCK = 64
"""Slots that sparse_attn of `kernel.py` takes at a time; the running maximum, and so P's rounding, depends on it."""


def pow2_ceil(x: Tensor) -> Tensor:
    """Positive fp32 numbers rounded up to a power of two by their bits: exponent plus one if the fraction is not 0."""
    bits = x.view(torch.int32)
    raised = (bits >> FP32_FRACTION) + (bits & FP32_FRACTION_MASK != 0).int()
    return (raised << FP32_FRACTION).view(torch.float32)


def fp4_fake_quant(x: Tensor) -> Tensor:
    """fp4_act_quant in place: bf16 [..., D] -> e2m1 (block 32, power-of-two scale, ties to even) -> bf16, exact."""
    blocks = torch.unflatten(x.float(), -1, (-1, FP4_BLOCK))
    scale = pow2_ceil(blocks.abs().amax(-1, keepdim=True).clamp(min=FP4_FLOOR) * (1 / FP4_MAX))
    value = (blocks / scale).clamp(-FP4_MAX, FP4_MAX)
    step = torch.where(value.abs() < 2, 0.5, torch.where(value.abs() < 4, 1.0, 2.0))
    return ((value / step).round() * step * scale).flatten(-2).to(torch.bfloat16)


def fp8_fake_quant(x: Tensor, mode: FakeQuant) -> Tensor:
    """act_quant in place: bf16 [..., D] -> grid -> bf16 (block 64, power-of-two scale).

    The published code rounds x / scale to its *input's* type, bf16, and the scale is a power of two: the result is x
    (as long as x / scale does not underflow, 2^-126 below the block's largest). The name of the operation says fp8;
    `intended` rounds to e4m3.
    """
    blocks = torch.unflatten(x.float(), -1, (-1, FP8_BLOCK))
    scale = pow2_ceil(blocks.abs().amax(-1, keepdim=True).clamp(min=FP8_FLOOR) * (1 / FP8_MAX))
    value = (blocks / scale).clamp(-FP8_MAX, FP8_MAX)
    grid = torch.bfloat16 if mode == "published" else torch.float8_e4m3fn
    return (value.to(grid).float() * scale).flatten(-2).to(torch.bfloat16)


def pool(kv_score: Tensor, ape: Tensor, ratio: int, *, max_bytes: int = MAX_BYTES) -> Tensor:
    """Gated pooling of a whole sequence in fp32, [T // ratio, D] fp32; arguments as in `compressor.pool`."""
    entries, dim = kv_score.shape[0] // ratio, ape.shape[-1]
    overlap = ape.shape[0] // ratio - 1
    pooled = kv_score.new_empty(entries, dim)
    for part in slices(entries, 5 * 4 * ape.shape[0] * dim, max_bytes):
        start = max(0, part.start - overlap)
        blocks = torch.unflatten(kv_score[start * ratio : part.stop * ratio], 0, (-1, ratio))
        half = (1 + overlap) * dim
        kv, gate = blocks[..., :half], blocks[..., half:]
        if overlap:
            bias = torch.cat((ape[:ratio], ape[ratio:]), -1)
            kv, gate = _overlap(kv, 0.0), _overlap(gate + bias, -torch.inf)
        else:
            gate = gate + ape
        pooled[part] = (kv * gate.softmax(1)).sum(1)[part.start - start :]
    return pooled


def _overlap(blocks: Tensor, missing: float) -> Tensor:
    """[n, ratio, 2 D] -> [n, 2 ratio, D]: the previous block's first half (`missing` for block 0), the own second."""
    count, ratio, width = blocks.shape
    slots = blocks.new_full((count, 2 * ratio, width // 2), missing)
    slots[:, ratio:] = blocks[..., width // 2 :]
    slots[1:, :ratio] = blocks[:-1, :, : width // 2]
    return slots


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm with an fp32 weight: bf16 in, fp32 inside, bf16 out."""
    exact = x.float()
    normed = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps)
    return (weight * normed).to(torch.bfloat16)


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotation of the last rope_dim of bf16 [..., D] by a table [..., rope_dim / 2]: fp32 inside, bf16 out."""
    table = table.to(torch.complex64)
    table = table.reshape(*table.shape[:-1], *(1,) * (x.ndim - table.ndim), table.shape[-1])
    plain = x.shape[-1] - 2 * table.shape[-1]
    pairs = torch.view_as_complex(torch.unflatten(x[..., plain:].float(), -1, (-1, 2)).contiguous())
    rotated = torch.view_as_real(pairs * table).flatten(-2).to(torch.bfloat16)
    return torch.cat((x[..., :plain], rotated), -1)


def rotate_activation(x: Tensor) -> Tensor:
    """Hadamard transform of bf16 [..., D]: fp32 butterflies, times D^-0.5, rounded to bf16 once."""
    width = x.shape[-1]
    done: Tensor = x.float()
    half = 1
    while half < width:
        low, high = torch.unflatten(done, -1, (-1, 2, half)).unbind(-2)
        done = torch.stack((low + high, low - high), -2).flatten(-3)
        half *= 2
    return done.mul(width**-0.5).to(torch.bfloat16)


def index_key(pooled: Tensor, norm_weight: Tensor, eps: float, table: Tensor) -> Tensor:
    """Index keys [E, D] bf16: pooled fp32 -> bf16, norm, rotation, Hadamard (each to bf16), FP4."""
    return fp4_fake_quant(rotate_activation(rotate(rms_norm(pooled.to(torch.bfloat16), norm_weight, eps), table)))


def index_query(query: Tensor, table: Tensor) -> Tensor:
    """Index queries [R, H, D] bf16: rotation to bf16, Hadamard to bf16, FP4."""
    return fp4_fake_quant(rotate_activation(rotate(query, table)))


def head_weight(weight: Tensor, scale: float) -> Tensor:
    """Head weights [R, H] bf16: bf16 weight times D^-0.5 H^-0.5, rounded to bf16."""
    return torch.mul(weight.to(torch.bfloat16), scale)


def score(q: Tensor, k: Tensor, w: Tensor, *, max_bytes: int = MAX_BYTES) -> Tensor:
    """Index scores [R, E] bf16: q . k to bf16 per head, ReLU, times w to bf16, sum over heads in fp32 to bf16.

    q [R, H, D], k [E, D], w [R, H]; bf16 values in any float dtype. Work is cut over rows and entries to stay in
    `max_bytes`.
    """
    rows, heads, dim = q.shape
    entries = k.shape[0]
    out = torch.empty(rows, entries, dtype=torch.bfloat16, device=q.device)
    each = 8 * heads  # a dot in fp32 and in bf16, with room for the sum over heads
    columns = max(1, min(entries, max_bytes // (2 * max(each, 4 * dim))))
    for right in slices(entries, 1, columns):
        keys = k[right].float().T
        for left in slices(rows, 2 * each * columns, max_bytes):
            dots = (q[left].float().flatten(0, 1) @ keys).to(torch.bfloat16)
            terms = torch.unflatten(dots.relu_(), 0, (-1, heads)).mul_(w[left].to(torch.bfloat16)[..., None])
            out[left, right] = terms.sum(1, dtype=torch.float32).to(torch.bfloat16)
    return out


def select(score: Tensor, visible: Tensor, k: int) -> Tensor:
    """torch.topk of each row's visible entries, [R, k] int32, best first, then -1. Which of equal scores wins is
    unspecified.

    score [R, E], visible [R]. The caller's scores are ranked as they are, in whatever precision they come.
    """
    width = score.shape[1]
    chosen = torch.full((score.shape[0], k), -1, dtype=torch.int32, device=score.device)
    hidden = torch.arange(width, device=score.device) >= visible[:, None]
    best = score.masked_fill(hidden, -torch.inf).topk(min(k, width), dim=1).indices
    chosen[:, : best.shape[1]] = torch.where(best < visible[:, None], best, -1)
    return chosen
