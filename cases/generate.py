"""From a case's recipe to the inputs of one layer: the same numbers whatever ran before and wherever."""

import torch
from torch import Tensor

from ..reference.inputs import CompressorInputs, LayerInputs
from .case import Case
from .draw import Draw
from .families import apply_family
from .rows import PAGE_SIZE, sampled_rows, window_of

APE_STD = 0.5
"""Spread of the gate bias: enough for the four phases of a block to differ, small beside the unit gate score."""

NORM_STD = 0.1
"""Spread of norm weights around 1. The compressors' are drawn in fp32, so that rounding one to bf16 on the way changes
results; `kv_norm_weight` is exact in bf16, as checkpoints hold it and SGLang's window store reads it."""

POOLED_STD = 0.55
"""Spread of a pooled entry: the root of E[sum w^2], w the softmax over 8 gates of N(0, 1 + APE_STD^2), for unit kv."""


def generate(case: Case, layer: int, device: str | torch.device = "cpu") -> LayerInputs:
    """Inputs of `layer` for `case`, shaped by the case's family, on `device`.

    Drawn on the CPU from `case.seed(layer)` and each tensor's name, so device, thread count, other tensors and other
    cases change nothing (`Draw.normal` says on which processors the bits are the same). Raises ValueError for an
    unknown family, parameter or layer, and for a request without tokens.
    """
    draw = Draw(case.seed(layer))
    return apply_family(case.family, _plain(case, layer, draw), draw, case.params).to(device)


def _plain(case: Case, layer: int, draw: Draw) -> LayerInputs:
    """Unit-variance Gaussian inputs with the case's lengths, steps, rows and pages."""
    config, kind = case.config, case.config.kind(layer)
    ratio = config.compress_ratios[layer]
    if not case.lengths or min(case.lengths) < 1:
        raise ValueError(f"case {case.id} has lengths {case.lengths}, and a request needs at least 1 token; correct it")
    prefix = tuple(case.prefix_tokens(length) // ratio if ratio else 0 for length in case.lengths)
    row_request, row_position = sampled_rows(case, ratio, draw)
    window_request, window_position, window_index = window_of(row_request, row_position, config.sliding_window)
    rows, heads = len(row_request), (config.index_n_heads, config.index_head_dim)
    pages, num_pages = _page_table(case, ratio, draw)
    width = config.head_dim
    tokens = sum(
        length - max(0, entries * ratio - (ratio if ratio == 4 else 0))
        for length, entries in zip(case.lengths, prefix, strict=True)
    )
    return LayerInputs(
        config=config,
        kind=kind,
        layer=layer,
        lengths=case.lengths,
        prefix_entries=prefix,
        steps=case.steps(),
        row_request=row_request,
        row_position=row_position,
        index=_compressor("index", draw, ratio, config.index_head_dim, tokens, sum(prefix)) if kind == "csa" else None,
        index_query=draw.normal("index_query", rows, *heads, dtype=torch.bfloat16) if kind == "csa" else None,
        index_weight=draw.normal("index_weight", rows, heads[0], dtype=torch.bfloat16) if kind == "csa" else None,
        main=_compressor("main", draw, ratio, width, tokens, sum(prefix)) if kind != "swa" else None,
        window_kv=draw.normal("window_kv", len(window_request), width, dtype=torch.bfloat16),
        window_request=window_request,
        window_position=window_position,
        window_index=window_index,
        kv_norm_weight=(1 + NORM_STD * draw.normal("kv_norm_weight", width)).to(torch.bfloat16).float(),
        attn_query=draw.normal("attn_query", rows, config.num_attention_heads, width, dtype=torch.bfloat16),
        attn_sink=draw.normal("attn_sink", config.num_attention_heads),
        page_table=pages,
        num_pages=num_pages,
        page_size=PAGE_SIZE,
    )


def _compressor(name: str, draw: Draw, ratio: int, width: int, tokens: int, prefix: int) -> CompressorInputs:
    """Inputs of one compressor: `tokens` rows of kv and gate score, `prefix` entries given pooled."""
    halves = 2 if ratio == 4 else 1
    return CompressorInputs(
        kv_score=draw.normal(f"{name}.kv_score", tokens, 2 * halves * width),
        ape=draw.normal(f"{name}.ape", halves * ratio, width).mul_(APE_STD),
        norm_weight=1 + NORM_STD * draw.normal(f"{name}.norm_weight", width),
        pooled_prefix=draw.normal(f"{name}.pooled_prefix", prefix, width).mul_(POOLED_STD),
    )


def _page_table(case: Case, ratio: int, draw: Draw) -> tuple[Tensor, int]:
    """Page table [N, pages] and the number of pages in the pool; no page has two owners.

    Page 0 holds data only when there is no spare page, so that a clamped -1 or an unset table lands on foreign bytes.
    """
    needed = [-(-(length // ratio) // PAGE_SIZE) if ratio else 0 for length in case.lengths]
    num_pages = max(1, sum(needed) + case.spare_pages)
    reserved = 1 if case.spare_pages else 0
    order = draw.permutation("page_table", num_pages - reserved)
    if not case.shuffled_pages:
        order = torch.arange(num_pages - reserved)
    table = torch.full((len(needed), max(1, *needed)), -1, dtype=torch.int64)
    start = 0
    for request, count in enumerate(needed):
        table[request, :count] = order[start : start + count] + reserved
        start += count
    return table, num_pages
