"""DeepSeek's published arithmetic on a layer's inputs: one function per stage, upstream tensors given by the caller."""

import torch
from torch import Tensor

from . import deepseek
from .attention import packed_selection
from .chunks import MAX_BYTES, slices
from .compressor import compressor_inputs, pooled_pieces
from .deepseek import FakeQuant
from .deepseek_attention import attend, attn_query, latents
from .indexer import indexer_inputs
from .inputs import LayerInputs
from .rope import rope_table

TEMPORARIES = 8
"""fp32 tensors of an entry's width that are alive at once while a key or latent is made; sizes the slices."""


def compressed(inputs: LayerInputs) -> Tensor:
    """Pooled index keys before the norm, [E, D] fp32."""
    dim = compressor_inputs(inputs, "index").ape.shape[-1]
    packed = torch.empty(inputs.entry_offset[-1], dim, device=inputs.row_position.device)
    for rows, pooled in pooled_pieces(inputs, "index", deepseek.pool):
        packed[rows] = pooled
    return packed


def index_k(inputs: LayerInputs, compressed: Tensor, *, max_bytes: int = MAX_BYTES) -> Tensor:
    """Index keys [E, D] bf16 (FP4 values) from pooled keys [E, D] fp32."""
    config, position = inputs.config, inputs.entry_position
    weight = compressor_inputs(inputs, "index").norm_weight
    keys = torch.empty(compressed.shape, dtype=torch.bfloat16, device=compressed.device)
    for part in slices(len(compressed), TEMPORARIES * 4 * compressed.shape[1], max_bytes):
        table = rope_table(config, inputs.kind, position[part])
        keys[part] = deepseek.index_key(compressed[part], weight, config.rms_norm_eps, table)
    return keys


def index_q(inputs: LayerInputs, *, max_bytes: int = MAX_BYTES) -> Tensor:
    """Index queries [R, H, D] bf16 (FP4 values)."""
    query, _ = indexer_inputs(inputs)
    queries = torch.empty(query.shape, dtype=torch.bfloat16, device=query.device)
    for part in slices(len(query), TEMPORARIES * 4 * query.shape[1] * query.shape[2], max_bytes):
        table = rope_table(inputs.config, inputs.kind, inputs.row_position[part])
        queries[part] = deepseek.index_query(query[part].to(torch.bfloat16), table)
    return queries


def head_weight(inputs: LayerInputs) -> Tensor:
    """Head weights [R, H] bf16."""
    return deepseek.head_weight(indexer_inputs(inputs)[1], inputs.config.index_scale)


def score(
    inputs: LayerInputs, index_k: Tensor, index_q: Tensor, head_weight: Tensor, *, max_bytes: int = MAX_BYTES
) -> Tensor:
    """Index scores [R, max visible] bf16, -inf past a row's visible entries."""
    visible = inputs.visible
    width = int(visible.max()) if len(visible) else 0
    out = torch.full((len(visible), width), -torch.inf, dtype=torch.bfloat16, device=index_q.device)
    for request, first in enumerate(inputs.entry_offset[:-1]):
        rows = (inputs.row_request == request).nonzero()[:, 0]
        if not len(rows):
            continue
        count = int(visible[rows].max())
        keys = index_k[first : first + count]
        out[rows, :count] = deepseek.score(index_q[rows], keys, head_weight[rows], max_bytes=max_bytes)
    return out.masked_fill_(torch.arange(width, device=out.device) >= visible[:, None], -torch.inf)


def topk(inputs: LayerInputs, score: Tensor) -> Tensor:
    """Selected entries [R, index_topk] int32, request-relative, best first, -1 padded."""
    return deepseek.select(score, inputs.visible, inputs.config.index_topk)


def window(inputs: LayerInputs, fake_quant: FakeQuant = "published") -> Tensor:
    """Window latents [W, C] bf16."""
    table = rope_table(inputs.config, inputs.kind, inputs.window_position)
    return latents(inputs.window_kv, inputs.kv_norm_weight, inputs.config.rms_norm_eps, table, fake_quant)


def compressed_latent(
    inputs: LayerInputs, fake_quant: FakeQuant = "published", *, max_bytes: int = MAX_BYTES
) -> Tensor:
    """Compressed latents [E, C] bf16; [0, C] for a swa layer."""
    width, device = inputs.config.head_dim, inputs.row_position.device
    made = torch.empty(inputs.entry_offset[-1], width, dtype=torch.bfloat16, device=device)
    if inputs.kind == "swa":
        return made
    weight, eps = compressor_inputs(inputs, "main").norm_weight, inputs.config.rms_norm_eps
    position = inputs.entry_position
    for rows, pooled in pooled_pieces(inputs, "main", deepseek.pool, max_bytes=max_bytes):
        for part in slices(len(pooled), TEMPORARIES * 4 * width, max_bytes):
            into = slice(rows.start + part.start, rows.start + part.stop)
            table = rope_table(inputs.config, inputs.kind, position[into])
            made[into] = latents(pooled[part], weight, eps, table, fake_quant)
    return made


def attention(
    inputs: LayerInputs, topk: Tensor | None, window: Tensor, compressed: Tensor, *, max_bytes: int = MAX_BYTES
) -> tuple[Tensor, Tensor]:
    """Attention output [R, A, C] bf16 before the inverse rotation, and log-sum-exp [R, A] fp32 without the sink."""
    config = inputs.config
    table = rope_table(config, inputs.kind, inputs.row_position)
    query = attn_query(inputs.attn_query.to(torch.bfloat16), config.rms_norm_eps, table)
    selected = packed_selection(inputs, topk)
    sink, scale = inputs.attn_sink, config.softmax_scale
    return attend(query, window, inputs.window_index, compressed, selected, sink, scale, max_bytes=max_bytes)
