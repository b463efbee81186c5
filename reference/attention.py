"""Sparse attention in fp64: latents, queries, and attention over the window and the selected entries with a sink."""

import torch
from torch import Tensor

from .chunks import MAX_BYTES, slices
from .inputs import LayerInputs
from .norm import rms_norm
from .rope import rope_table, rotate


def latent(kv: Tensor, norm_weight: Tensor, eps: float, table: Tensor) -> Tensor:
    """Latent that serves as key and value, [., C] fp64: norm, then rotation of the last rope_dim.

    kv [., C] (a token's latent, or a pooled entry of the main compressor), norm_weight [C], table [., rope_dim / 2].
    """
    return rotate(rms_norm(kv, norm_weight, eps), table)


def attn_query(q: Tensor, eps: float, table: Tensor) -> Tensor:
    """Attention queries [R, A, C] fp64: norm per head without weight, then rotation. table [R, rope_dim / 2]."""
    return rotate(rms_norm(q, None, eps), table)


def sparse_attention(
    q: Tensor,
    window: Tensor,
    window_index: Tensor,
    compressed: Tensor,
    selected: Tensor,
    sink: Tensor,
    scale: float,
    *,
    max_bytes: int = MAX_BYTES,
) -> tuple[Tensor, Tensor]:
    """Attention of each row over its window and its selected entries, with a sink (`kernel.py`, sparse_attn).

    q [R, A, C]; window [W, C] with window_index [R, w]; compressed [E, C] with selected [R, k] (packed entries). An
    index < 0 contributes nothing, whatever any slot holds (contract K9). sink [A]: adds exp(sink) to the denominator,
    has no value. Returns out [R, A, C] fp64 and lse [R, A] fp64, the natural log-sum-exp of the scaled dots without the
    sink. A row without any valid index has out 0 and lse -inf.
    """
    return _attend(q, window, window_index, compressed, selected, sink, scale, max_bytes, magnitude=False)


def attention_magnitude(
    q: Tensor,
    window: Tensor,
    window_index: Tensor,
    compressed: Tensor,
    selected: Tensor,
    sink: Tensor,
    scale: float,
    *,
    max_bytes: int = MAX_BYTES,
) -> Tensor:
    """Sum of the absolute terms of `sparse_attention`'s output, [R, A, C] fp64: probability * |value| over slots."""
    return _attend(q, window, window_index, compressed, selected, sink, scale, max_bytes, magnitude=True)[0]


def _attend(
    q: Tensor,
    window: Tensor,
    window_index: Tensor,
    compressed: Tensor,
    selected: Tensor,
    sink: Tensor,
    scale: float,
    max_bytes: int,
    *,
    magnitude: bool,
) -> tuple[Tensor, Tensor]:
    rows, heads, dim = q.shape
    slots = window_index.shape[1] + selected.shape[1]
    out = torch.zeros(rows, heads, dim, dtype=torch.float64, device=q.device)
    lse = torch.full((rows, heads), -torch.inf, dtype=torch.float64, device=q.device)
    for part in slices(rows, 8 * (3 * slots * dim + 4 * heads * slots + 3 * heads * dim), max_bytes):
        values = torch.cat((_gather(window, window_index[part]), _gather(compressed, selected[part])), 1)
        valid = torch.cat((window_index[part] >= 0, selected[part] >= 0), 1)
        out[part], lse[part] = _softmax_with_sink(q[part].double(), values, valid, sink.double(), scale, magnitude)
    return out, lse


def _gather(source: Tensor, index: Tensor) -> Tensor:
    """source[index] as fp64, [R, slots, C], with zeros (not a slot's bytes times zero) where index < 0."""
    if not source.shape[0]:
        if (index >= 0).any():
            raise ValueError("an index names an entry and there is none: check the topk stage")
        return torch.zeros(*index.shape, source.shape[1], dtype=torch.float64, device=source.device)
    return source[index.long().clamp(min=0)].double().masked_fill_((index < 0)[..., None], 0.0)


def _softmax_with_sink(
    q: Tensor, values: Tensor, valid: Tensor, sink: Tensor, scale: float, magnitude: bool
) -> tuple[Tensor, Tensor]:
    logit = (q @ values.transpose(1, 2) * scale).masked_fill_(~valid[:, None], -torch.inf)
    lse = logit.logsumexp(-1)
    probability = (logit - torch.logaddexp(lse, sink)[..., None]).exp()
    probability.masked_fill_(~valid[:, None], 0.0)
    return probability @ (values.abs() if magnitude else values), lse


def packed_selection(inputs: LayerInputs, topk: Tensor | None) -> Tensor:
    """The entries each row attends to, as indices into the packed entry axis, -1 padded, int64 [R, k].

    csa: `topk` [R, k] (request-relative) plus the request's offset. hca: every visible entry. swa: none, [R, 0].
    """
    visible = inputs.visible
    if inputs.kind == "csa":
        if topk is None:
            raise ValueError("a csa layer attends to selected entries and topk is None: give the topk stage")
        relative = topk.long()
    else:
        width = int(visible.max()) if len(visible) else 0
        every = torch.arange(width, device=visible.device).expand(len(visible), width)
        relative = every.masked_fill(every >= visible[:, None], -1)
    offset = torch.tensor(inputs.entry_offset, device=visible.device)[inputs.row_request]
    return torch.where(relative >= 0, relative + offset[:, None], -1)


def attend_layer(
    inputs: LayerInputs, topk: Tensor | None, window: Tensor, compressed: Tensor, *, max_bytes: int = MAX_BYTES
) -> tuple[Tensor, Tensor]:
    """Attention of a layer's rows: out [R, A, C] fp64 before the inverse rotation, lse [R, A] fp64 without the sink.

    topk [R, k] request-relative (csa only, else None); window [W, C] and compressed [E, C] as attention reads them.
    """
    config = inputs.config
    table = rope_table(config, inputs.kind, inputs.row_position)
    return sparse_attention(
        attn_query(inputs.attn_query, config.rms_norm_eps, table),
        window,
        inputs.window_index,
        compressed,
        packed_selection(inputs, topk),
        inputs.attn_sink,
        config.softmax_scale,
        max_bytes=max_bytes,
    )
