"""Puts chosen keys, queries and latents into a layer's inputs: the inverse of the maths between input and scorer.

A key is chosen where it acts, in the space of the scorer (after norm, RoPE and Hadamard), and written where the layer
reads it, as token rows before pooling. All functions change the tensors they are given.
"""

import torch
from torch import Tensor

from ..reference.compressor import OVERLAP_RATIO, Which, compressor_inputs, pool
from ..reference.hadamard import hadamard
from ..reference.indexer import index_key, index_query, score
from ..reference.inputs import LayerInputs
from ..reference.rope import rope_table, rotate_inverse


def pooled_for_key(inputs: LayerInputs, key: Tensor, entry: Tensor) -> Tensor:
    """Pooled values [n, D] fp32 whose index keys point along `key` [n, D], for entries [n] int64 of their request.

    The norm fixes a key's length, so only the direction of `key` counts.
    """
    table = rope_table(inputs.config, inputs.kind, entry * inputs.ratio)
    return _before_norm(rotate_inverse(hadamard(key), table), compressor_inputs(inputs, "index").norm_weight)


def pooled_for_latent(inputs: LayerInputs, latent: Tensor, entry: Tensor) -> Tensor:
    """Pooled values [n, C] fp32 whose compressed latents point along `latent` [n, C], for entries [n] of a request."""
    table = rope_table(inputs.config, inputs.kind, entry * inputs.ratio)
    return _before_norm(rotate_inverse(latent, table), compressor_inputs(inputs, "main").norm_weight)


def _before_norm(normed: Tensor, weight: Tensor) -> Tensor:
    exact = normed / weight.double()
    return (exact / exact.square().mean(-1, keepdim=True).sqrt()).float()


def query_for(inputs: LayerInputs, scorer_query: Tensor) -> Tensor:
    """Index queries [R, H, D] bf16 that reach the scorer as `scorer_query` [R, H, D], up to one bf16 rounding."""
    table = rope_table(inputs.config, inputs.kind, inputs.row_position)
    return rotate_inverse(hadamard(scorer_query), table).to(torch.bfloat16)


def plant_pooled(inputs: LayerInputs, which: Which, request: int, entry: Tensor, value: Tensor) -> None:
    """Makes the entries [n] of `request` pool to `value` [n, D] whatever the gates say.

    Every slot that the entry pools (its own tokens, and the overlap columns of the block before, which no other entry
    reads) holds the value, so the softmax weighs n equal terms. Entries given pooled are written as they are.
    """
    compressor = compressor_inputs(inputs, which)
    given, dim = inputs.prefix_entries[request], compressor.ape.shape[-1]
    before = entry < given
    start = sum(inputs.prefix_entries[:request])
    compressor.pooled_prefix[start + entry[before]] = value[before].float()
    entry, value = entry[~before], value[~before].float()[:, None]
    own = entry_tokens(inputs, request, entry)
    if inputs.ratio != OVERLAP_RATIO:
        compressor.kv_score[own, :dim] = value
        return
    compressor.kv_score[own, dim : 2 * dim] = value
    later = entry > 0
    compressor.kv_score[own[later] - inputs.ratio, :dim] = value[later]


def entry_tokens(inputs: LayerInputs, request: int, entry: Tensor) -> Tensor:
    """Rows of `kv_score` that hold the own tokens of entries [n] of `request`, [n, ratio] int64."""
    first = inputs.token_offset[request] - inputs.first_token(request)
    return first + entry[:, None] * inputs.ratio + torch.arange(inputs.ratio)


def sampled_keys(inputs: LayerInputs, request: int, entry: Tensor) -> Tensor:
    """Exact index keys [n, D] fp64 of some entries [n] >= 1 of `request`, without pooling the others."""
    index = compressor_inputs(inputs, "index")
    given = inputs.prefix_entries[request]
    pooled = torch.empty(len(entry), index.ape.shape[-1], dtype=torch.float64)
    before = entry < given
    start = sum(inputs.prefix_entries[:request])
    pooled[before] = index.pooled_prefix[start + entry[before]].double()
    own = entry_tokens(inputs, request, entry[~before])
    pairs = torch.cat((own - inputs.ratio, own), 1)  # the block before and the own one: the second entry of a pair
    pooled[~before] = pool(index.kv_score[pairs.flatten()], index.ape, inputs.ratio)[1::2]
    table = rope_table(inputs.config, inputs.kind, entry * inputs.ratio)
    return index_key(pooled, index.norm_weight, inputs.config.rms_norm_eps, table)


def scorer_queries(inputs: LayerInputs) -> tuple[Tensor, Tensor]:
    """Exact index queries [R, H, D] and unscaled head weights [R, H] of a csa layer, fp64."""
    assert inputs.index_query is not None and inputs.index_weight is not None
    table = rope_table(inputs.config, inputs.kind, inputs.row_position)
    return index_query(inputs.index_query, table), inputs.index_weight.double()


def row_scores(query: Tensor, weight: Tensor, key: Tensor) -> Tensor:
    """Unscaled score of each row with its own key: query [R, H, D], weight [R, H], key [R, D] -> [R] fp64."""
    return torch.cat([score(query[row, None], key[row, None], weight[row, None])[0] for row in range(len(key))])
