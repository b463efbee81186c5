"""What each preparation stage should have computed, as balls: pooling, index key and query, head weight, latents.

Every function takes what the path read (inputs, or tensors the path stored upstream) and its `Declaration`, and returns
the ball *before* the stage's last rounding, which `metrics.py` judges.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from .ball import SECOND_ORDER, TINY_FP32, Ball, gamma, hadamard, published_query_norm, rms_norm, rotate, round_to, unit
from .paths.base import Arithmetic, Declaration
from .reference.chunks import slices
from .reference.compressor import OVERLAP_RATIO, Which, compressor_inputs
from .reference.inputs import LayerInputs
from .reference.rope import rope_table

CHUNK_BYTES = 8 * 2**20
"""Bytes of one fp64 temporary: small enough to stay in a core's cache, where these elementwise passes spend no time
waiting for memory."""

EXPONENTIALS = 2
"""Exponentials behind one gate weight at most: its own, and the rescaling of a partial softmax."""


def pool_slots(kv_score: Tensor, ape: Tensor, ratio: int, part: slice) -> tuple[Tensor, Tensor]:
    """Values and biased gates of the slots that entries part.start to part.stop pool, each [n, slots, D] fp64.

    Contracts K2 and K3: ratio 4 sees the previous block through the overlap columns (gate -inf for entry 0), then its
    own block; the bias goes by absolute position in the block.
    """
    dim, bias = ape.shape[-1], ape.double()
    own = torch.unflatten(kv_score[part.start * ratio : part.stop * ratio].double(), 0, (-1, ratio))
    if ratio != OVERLAP_RATIO:
        return own[..., :dim], own[..., dim:] + bias
    first = max(part.start - 1, 0)
    before = torch.unflatten(kv_score[first * ratio : (part.stop - 1) * ratio].double(), 0, (-1, ratio))
    gate_before = before[..., 2 * dim : 3 * dim] + bias[:ratio]
    kv_before = before[..., :dim]
    if part.start == 0:
        kv_before = torch.cat((torch.zeros_like(own[:1, :, :dim]), kv_before))
        gate_before = torch.cat((torch.full_like(own[:1, :, :dim], -torch.inf), gate_before))
    kv = torch.cat((kv_before, own[..., dim : 2 * dim]), 1)
    return kv, torch.cat((gate_before, own[..., 3 * dim :] + bias[ratio:]), 1)


def pool_ball(kv: Tensor, gate: Tensor, arithmetic: Arithmetic) -> Ball:
    """Gated pooling y = sum(kv e) / sum(e), e_j = exp(g_j - max g), of [n, slots, D]; mid equals `reference.pool`.

    Relative error of e_j: adding the bias costs u |g_j| in the argument (the maximum's own error is common to all
    slots and cancels); the subtraction, and exp(x) as 2^(x log2 e) or as an approximate instruction (2 + 1.173 |x| ulp
    for `fp32_fast`, CUDA's table for __expf), together at most 4 u |x| + 4 u. Twice, because a partial softmax is
    rescaled by a second exponential: eta_j = u (|g_j| + 8 |d_j| + 8).
    A common relative error of all e_j cancels in the quotient, so only the spread around y counts:
    sum p_j eta_j |kv_j - y|. Then slots products and additions in any order, gamma(slots + 4) sum p_j |kv_j|, and the
    division (approximate: 2 ulp), 6 u |y|. Weights below the smallest normal number may be flushed to zero.
    """
    roundoff = unit(arithmetic)
    below = gate - gate.amax(1, keepdim=True)
    weight = below.exp()
    weight /= weight.sum(1, keepdim=True)
    mid = (kv * weight).sum(1)
    eta = (below.abs_().mul_(4 * EXPONENTIALS) + gate.abs()).add_(4 * EXPONENTIALS).mul_(roundoff)
    eta.nan_to_num_(posinf=0.0).mul_(weight)
    spread = eta.mul_((kv - mid[:, None]).abs_()).sum(1)
    terms = weight.mul_(kv.abs()).sum(1)
    slots = kv.shape[1]
    flushed = slots * TINY_FP32 * kv.abs().amax(1)
    rad = SECOND_ORDER * spread + gamma(slots + 4, roundoff) * terms + 6 * roundoff * mid.abs() + flushed
    return Ball(mid, rad)


def pooled(inputs: LayerInputs, which: Which, arithmetic: Arithmetic, every: int = 1) -> Iterator[tuple[slice, Ball]]:
    """Pooled entries of a layer piece by piece: (rows of the packed entry axis, ball [rows, D]).

    Entries given pooled (`pooled_prefix`) come with radius 0. every   only each `every`-th piece is made, and the last
    piece of each request, where a cache's tail is.
    """
    read = compressor_inputs(inputs, which)
    prefix = 0
    for request, complete in enumerate(inputs.entries):
        first, given = inputs.entry_offset[request], inputs.prefix_entries[request]
        for part in _every(given, 8 * read.ape.shape[-1], every):
            rows = slice(first + part.start, first + part.stop)
            yield rows, Ball.exact(read.pooled_prefix[prefix + part.start : prefix + part.stop])
        prefix += given
        tokens = read.kv_score[inputs.token_offset[request] : inputs.token_offset[request + 1]]
        skip = given - inputs.first_token(request) // inputs.ratio
        for part in _every(complete - given, 8 * read.ape.numel(), every):
            block = slice(skip + part.start, skip + part.stop)
            kv, gate = pool_slots(tokens, read.ape, inputs.ratio, block)
            rows = slice(first + given + part.start, first + given + part.stop)
            yield rows, pool_ball(kv, gate, arithmetic)


def _every(total: int, bytes_each: int, every: int) -> list[slice]:
    parts = list(slices(total, bytes_each, CHUNK_BYTES))
    return parts[:-1][::every] + parts[-1:]


def index_key(inputs: LayerInputs, pooled_key: Tensor, entries: slice, declares: Declaration) -> Ball:
    """Index keys before storage, from the path's own pooled keys [n, D] of packed `entries` (contract K4)."""
    roundoff, key = unit(declares.pool), declares.key
    weight = compressor_inputs(inputs, "index").norm_weight
    table = rope_table(inputs.config, inputs.kind, inputs.entry_position[entries])
    ball = round_to(Ball.exact(pooled_key), key.pooled)
    ball = round_to(rms_norm(ball, weight, inputs.config.rms_norm_eps, roundoff), key.normed)
    ball = round_to(rotate(ball, table, roundoff), key.rotated)
    return round_to(hadamard(ball, roundoff), key.transformed)


def index_query(inputs: LayerInputs, rows: slice, declares: Declaration) -> Ball:
    """Index queries [n, H, D] of `rows` before storage: rotation at the row's position, Hadamard."""
    assert inputs.index_query is not None
    roundoff, query = unit(declares.pool), declares.query
    table = rope_table(inputs.config, inputs.kind, inputs.row_position[rows])
    ball = round_to(rotate(Ball.exact(inputs.index_query[rows]), table, roundoff), query.rotated)
    return round_to(hadamard(ball, roundoff), query.transformed)


WEIGHT_ROUNDINGS = 5
"""fp32 roundings behind a head weight: the constant, the product, folding the query scale in and out again (3)."""


def head_weight(inputs: LayerInputs, declares: Declaration) -> Ball:
    """Effective head weights [R, H] before a declared rounding: weight * index_scale within WEIGHT_ROUNDINGS u."""
    assert inputs.index_weight is not None
    mid = inputs.index_weight.double() * inputs.config.index_scale
    return Ball.exact(mid).relative(gamma(WEIGHT_ROUNDINGS, unit(declares.score)))


def latent(
    inputs: LayerInputs, source: Ball, norm_weight: Tensor, position: Tensor, declares: Declaration, *, window: bool
) -> tuple[Ball, Ball]:
    """Latents before storage: (dims without RoPE [n, C - rope], RoPE dims [n, rope]).

    source [n, C]: a token's latent or a pooled entry. The declared roundings of `window` or `latent` apply to the dims
    without RoPE, in order (there the rotation is the identity, so `rotated` and `transformed` are further roundings);
    `rope_tail` has those of the others.
    """
    roundoff = unit(declares.pool)
    nope, tail = (declares.window if window else declares.latent), declares.rope_tail
    plain = inputs.config.head_dim - inputs.config.qk_rope_head_dim
    table = rope_table(inputs.config, inputs.kind, position)
    normed = rms_norm(round_to(source, nope.pooled), norm_weight, inputs.config.rms_norm_eps, roundoff)
    flat = round_to(normed[..., :plain], nope.normed)
    flat = round_to(round_to(flat, nope.rotated), nope.transformed)
    turned = rotate(round_to(normed[..., plain:], tail.normed), table, roundoff)
    return flat, round_to(round_to(turned, tail.rotated), tail.transformed)


def attention_query(inputs: LayerInputs, rows: slice | Tensor, declares: Declaration) -> Ball:
    """Attention queries [n, A, C] as the dot products read them, every declared rounding applied.

    `attention="bf16"` stands for the published norm, whose square, mean, rsqrt and product are bf16 tensors.
    """
    roundoff, declared = unit(declares.attention), declares.attn_query
    query, eps = inputs.attn_query[rows], inputs.config.rms_norm_eps
    published = declares.attention == "bf16"
    normed = published_query_norm(query, eps) if published else rms_norm(Ball.exact(query), None, eps, roundoff)
    table = rope_table(inputs.config, inputs.kind, inputs.row_position[rows])
    turned = round_to(rotate(round_to(normed, declared.normed), table, roundoff), declared.rotated)
    return round_to(turned, "bf16" if declared.stored == "bf16" else "none")
