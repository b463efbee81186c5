"""A layer's inputs from its weights and the hidden states that enter its attention."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import linear

from .cases.case import Case
from .cases.draw import Draw
from .cases.generate import generate
from .reference.inputs import CompressorInputs, LayerInputs, Step
from .weights import LayerWeights, finite

TOKENS_AT_ONCE = 1024
"""Tokens of one GEMM call: 16 MB of hidden states in fp32 at 4,096 channels."""


def random_hidden(case: Case, layer: int, hidden_size: int) -> list[Tensor]:
    """[length, hidden_size] bf16 unit Gaussian of every request: what an RMSNorm with weight 1 gives to attention."""
    draw = Draw(case.seed(layer))
    return [
        draw.normal(f"hidden/{request}", length, hidden_size, dtype=torch.bfloat16)
        for request, length in enumerate(case.lengths)
    ]


def make_inputs(
    weights: LayerWeights,
    hidden: Sequence[Tensor],
    case: Case,
    *,
    q_latent: Sequence[Tensor] | None = None,
    steps: tuple[Step, ...] | None = None,
) -> LayerInputs:
    """`LayerInputs` of one layer for `case`, with rows, windows and pages drawn as for a generated case.

    Args: hidden, a [length, hidden_size] bf16 tensor a request: what enters the attention, after attn_norm. q_latent, a
    [length, q_lora_rank] bf16 tensor a request, after q_norm; made from `hidden` if not given. steps, how the tokens
    arrived, instead of the case's.

    Every product is made in fp32 from bf16 operands and rounded once to the dtype that `LayerInputs` states; the fp8
    rounding of activations before fp8 matrices is not applied, so that the inputs are the same for every path.
    """
    _check(weights, hidden, case)
    plain = in_step_order(generate(replace(case, pooled_prefix=0), weights.layer), steps)
    normed = q_latent or [by_chunks(tokens, lambda part: _query_latent(weights, part)) for tokens in hidden]
    at_rows = _gather(hidden, plain.row_request, plain.row_position)
    query = _gather(normed, plain.row_request, plain.row_position)
    config, bf16 = weights.config, torch.bfloat16
    window = _gather(hidden, plain.window_request, plain.window_position)
    tokens = torch.cat(list(hidden))
    made = replace(
        plain,
        config=config,
        index=_compressor(weights, "indexer.compressor.", tokens) if weights.kind == "csa" else None,
        main=_compressor(weights, "compressor.", tokens) if weights.kind != "swa" else None,
        window_kv=_product(weights["wkv.weight"], window).to(bf16),
        kv_norm_weight=weights["kv_norm.weight"],
        attn_query=_product(weights["wq_b.weight"], query).to(bf16).view(len(query), -1, config.head_dim),
        attn_sink=weights["attn_sink"],
    )
    if weights.kind != "csa":
        return made
    index_query = _product(weights["indexer.wq_b.weight"], query).to(bf16)
    return replace(
        made,
        index_query=index_query.view(len(query), config.index_n_heads, config.index_head_dim),
        index_weight=_product(weights["indexer.weights_proj.weight"], at_rows).to(bf16),
    )


def in_step_order(inputs: LayerInputs, steps: tuple[Step, ...] | None) -> LayerInputs:
    """`inputs` with these steps and its rows (and their windows) in the order in which the steps bring them."""
    if steps is None:
        return inputs
    arrival = {
        (span.request, token): (number, place)
        for number, step in enumerate(steps)
        for place, span in enumerate(step)
        for token in range(span.start, span.stop)
    }
    rows = list(zip(inputs.row_request.tolist(), inputs.row_position.tolist(), strict=True))
    order = torch.tensor(sorted(range(len(rows)), key=lambda row: (arrival[rows[row]], rows[row][1])))
    return replace(
        inputs,
        steps=steps,
        row_request=inputs.row_request[order],
        row_position=inputs.row_position[order],
        window_index=inputs.window_index[order],
    )


def _check(weights: LayerWeights, hidden: Sequence[Tensor], case: Case) -> None:
    if len(hidden) != len(case.lengths):
        raise ValueError(f"{len(hidden)} hidden-state tensors for {len(case.lengths)} requests; give one a request")
    for request, (tokens, length) in enumerate(zip(hidden, case.lengths, strict=True)):
        shape = (length, weights.config.hidden_size)
        if tuple(tokens.shape) != shape:
            raise ValueError(f"hidden[{request}] is {list(tokens.shape)}, not {list(shape)}")
        finite(f"hidden[{request}]", tokens)


def by_chunks(tokens: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
    """`make` of `TOKENS_AT_ONCE` rows at a time, so that memory does not grow with the prompt's square or fp32 copy."""
    return torch.cat([make(part) for part in torch.split(tokens, TOKENS_AT_ONCE)])


def _product(matrix: Tensor, rows: Tensor) -> Tensor:
    """rows @ matrix^T in fp32, [R, out]."""
    wide = matrix.float()
    return by_chunks(rows, lambda part: linear(part.float(), wide))


def _query_latent(weights: LayerWeights, tokens: Tensor) -> Tensor:
    """q_norm(wq_a x) in bf16, [T, q_lora_rank] (model.py, Attention: qr)."""
    low = _product(weights["wq_a.weight"], tokens).to(torch.bfloat16).float()
    scale = torch.rsqrt(low.square().mean(-1, keepdim=True) + weights.config.rms_norm_eps)
    return (low * scale * weights["q_norm.weight"]).to(torch.bfloat16)


def _compressor(weights: LayerWeights, prefix: str, tokens: Tensor) -> CompressorInputs:
    """A compressor's inputs: kv then gate score, fp32; the gate bias of ratio 4 split into overlap and own rows."""
    ape = weights[f"{prefix}ape"]
    if weights.kind == "csa":
        ape = torch.cat(ape.chunk(2, dim=1))
    products = [_product(weights[f"{prefix}{name}.weight"], tokens) for name in ("wkv", "wgate")]
    norm = weights[f"{prefix}norm.weight"]
    return CompressorInputs(torch.cat(products, dim=1), ape.contiguous(), norm, torch.empty(0, len(norm)))


def _gather(per_request: Sequence[Tensor], request: Tensor, position: Tensor) -> Tensor:
    """Rows (request, position) of ragged tensors, [R, width]."""
    first = torch.tensor([0, *(len(tokens) for tokens in per_request)]).cumsum(0)
    return torch.cat(list(per_request))[first[request] + position]
