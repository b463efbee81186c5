"""The oracle: every stage of a layer in fp64 from the inputs or from given upstream tensors. One function per stage."""

import torch
from torch import Tensor

from . import indexer as _indexer
from .attention import attend_layer, latent
from .chunks import MAX_BYTES, slices
from .compressor import compressor_inputs, pool_layer, pooled_pieces
from .indexer import indexer_inputs, score_layer, select
from .inputs import LayerInputs
from .rope import rope_table, rotate_inverse

TEMPORARIES = 10
"""Tensors of an entry's width that are alive at once while a key or latent is made; sizes the slices."""


def compressed(inputs: LayerInputs, *, max_bytes: int = MAX_BYTES) -> Tensor:
    """Pooled index keys before the norm, [E, D] fp64."""
    return pool_layer(inputs, "index", max_bytes=max_bytes)


def index_k(inputs: LayerInputs, compressed: Tensor, *, max_bytes: int = MAX_BYTES) -> Tensor:
    """Index keys [E, D] fp64 from pooled keys [E, D]."""
    config, position = inputs.config, inputs.entry_position
    weight = compressor_inputs(inputs, "index").norm_weight
    keys = torch.empty(compressed.shape, dtype=torch.float64, device=compressed.device)
    for part in slices(len(compressed), TEMPORARIES * 8 * compressed.shape[1], max_bytes):
        table = rope_table(config, inputs.kind, position[part])
        keys[part] = _indexer.index_key(compressed[part], weight, config.rms_norm_eps, table)
    return keys


def index_q(inputs: LayerInputs, *, max_bytes: int = MAX_BYTES) -> Tensor:
    """Index queries [R, H, D] fp64."""
    query, _ = indexer_inputs(inputs)
    rotated = torch.empty(query.shape, dtype=torch.float64, device=query.device)
    for part in slices(len(query), TEMPORARIES * 8 * query.shape[1] * query.shape[2], max_bytes):
        table = rope_table(inputs.config, inputs.kind, inputs.row_position[part])
        rotated[part] = _indexer.index_query(query[part], table)
    return rotated


def head_weight(inputs: LayerInputs) -> Tensor:
    """Effective head weights [R, H] fp64."""
    return _indexer.head_weight(indexer_inputs(inputs)[1], inputs.config)


def score(
    inputs: LayerInputs, index_k: Tensor, index_q: Tensor, head_weight: Tensor, *, max_bytes: int = MAX_BYTES
) -> Tensor:
    """Index scores [R, max visible] fp64, -inf past a row's visible entries."""
    return score_layer(inputs, index_q, index_k, head_weight, max_bytes=max_bytes)


def topk(inputs: LayerInputs, score: Tensor) -> Tensor:
    """Selected entries [R, index_topk] int32, request-relative, -1 padded."""
    return select(score, inputs.visible, inputs.config.index_topk)


def window(inputs: LayerInputs) -> Tensor:
    """Window latents [W, C] fp64."""
    table = rope_table(inputs.config, inputs.kind, inputs.window_position)
    return latent(inputs.window_kv, inputs.kv_norm_weight, inputs.config.rms_norm_eps, table)


def compressed_latent(inputs: LayerInputs, *, dtype: torch.dtype = torch.float64, max_bytes: int = MAX_BYTES) -> Tensor:
    """Compressed latents [E, C], computed in fp64 and returned as `dtype`; [0, C] for a swa layer.

    `dtype` is there because a million tokens' latents take 1 GiB in fp64.
    """
    width, device = inputs.config.head_dim, inputs.row_position.device
    latents = torch.empty(inputs.entry_offset[-1], width, dtype=dtype, device=device)
    if inputs.kind == "swa":
        return latents
    weight, eps = compressor_inputs(inputs, "main").norm_weight, inputs.config.rms_norm_eps
    position = inputs.entry_position
    for rows, pooled in pooled_pieces(inputs, "main", max_bytes=max_bytes):
        for part in slices(len(pooled), TEMPORARIES * 8 * width, max_bytes):
            into = slice(rows.start + part.start, rows.start + part.stop)
            latents[into] = latent(pooled[part], weight, eps, rope_table(inputs.config, inputs.kind, position[into]))
    return latents


def attention(
    inputs: LayerInputs, topk: Tensor | None, window: Tensor, compressed: Tensor, *, max_bytes: int = MAX_BYTES
) -> tuple[Tensor, Tensor]:
    """Attention output [R, A, C] fp64 before the inverse rotation, and log-sum-exp [R, A] fp64 without the sink."""
    return attend_layer(inputs, topk, window, compressed, max_bytes=max_bytes)


def output(inputs: LayerInputs, attention: Tensor) -> Tensor:
    """Attention output after the inverse rotation at the row's position, [R, A, C] fp64 (what wo_a reads)."""
    return rotate_inverse(attention, rope_table(inputs.config, inputs.kind, inputs.row_position))


def run(inputs: LayerInputs, *, max_bytes: int = MAX_BYTES) -> dict[str, dict[str, Tensor]]:
    """All stages of the layer, chained in fp64: {stage: {tensor name: tensor}} as the stage table lays them out."""
    stages: dict[str, dict[str, Tensor]] = {}
    selected = None
    if inputs.kind == "csa":
        pooled = compressed(inputs, max_bytes=max_bytes)
        keys = index_k(inputs, pooled, max_bytes=max_bytes)
        queries, weights = index_q(inputs, max_bytes=max_bytes), head_weight(inputs)
        scores = score(inputs, keys, queries, weights, max_bytes=max_bytes)
        selected = topk(inputs, scores)
        stages = {
            "compressed": {"value": pooled},
            "index_k": {"value": keys},
            "index_q": {"value": queries},
            "head_weight": {"value": weights},
            "score": {"value": scores},
            "topk": {"value": selected},
        }
    near, far = window(inputs), compressed_latent(inputs, max_bytes=max_bytes)
    out, lse = attention(inputs, selected, near, far, max_bytes=max_bytes)
    return stages | {"kv": {"window": near, "compressed": far}, "attention": {"value": out, "lse": lse}}
