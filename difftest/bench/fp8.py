"""SGLang's fp8 index kernels as the bench calls them. Without SGLang its rows say so."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels.layout import PAGE_ENTRIES
from .operands import FP8_PAGE_BYTES

Launch = Callable[[], Any]
SMALLEST_SCALE = 1.0


def deep_gemm() -> Any:
    """The module `deep_gemm`, which links against `tvm_ffi` and has to be loaded after it."""
    import tvm_ffi  # noqa: F401
    import deep_gemm as module  # isort: skip

    return module


def paged_read(
    codes: Tensor, weight: Tensor, pool: Tensor, tables: Sequence[Tensor], lengths: Tensor, next_n: int = 1
) -> list[Launch]:
    """`fp8_paged_mqa_logits`, a call for each table. codes e4m3 [R, 64, 128], lengths int32 [R]."""
    module = deep_gemm()
    context = lengths.view(-1, next_n).contiguous()
    schedule = module.get_paged_mqa_logits_metadata(context, PAGE_ENTRIES, module.get_num_sms())
    keys = pool.view(len(pool), PAGE_ENTRIES, 1, FP8_PAGE_BYTES // PAGE_ENTRIES)
    query = codes.view(-1, next_n, *codes.shape[1:])
    width = tables[0].shape[1] * PAGE_ENTRIES

    def call(table: Tensor) -> Launch:
        return lambda: module.fp8_paged_mqa_logits(query, keys, weight, context, table, schedule, width, False)

    return [call(table) for table in tables]


def contiguous_read(codes: Tensor, weight: Tensor, keys: Tensor, lengths: Tensor) -> list[Launch]:
    """`fp8_mqa_logits` over e4m3 keys [E, 128] at scale 1."""
    module = deep_gemm()
    scale = torch.full((len(keys),), SMALLEST_SCALE, device=keys.device)
    start = torch.zeros_like(lengths)
    return [
        lambda: module.fp8_mqa_logits(
            codes, (keys, scale), weight, start, lengths, clean_logits=False, max_seqlen_k=len(keys)
        )
    ]


def store(
    pooled: Sequence[Tensor],
    plan: Any,
    norm_weight: Tensor,
    eps: float,
    table: Tensor,
    out_locs: Sequence[Tensor],
    pool: Tensor,
) -> list[Launch]:
    """`compress_norm_rope_store` of one prefill plan, a call for each (pooled, out_loc); table complex64."""
    from sglang.kernels.ops.attention.dsv4 import compress_norm_rope_store

    def call(values: Tensor, out_loc: Tensor) -> Launch:
        return lambda: compress_norm_rope_store(
            values,
            plan,
            norm_weight=norm_weight,
            norm_eps=eps,
            freq_cis=table,
            out_loc=out_loc,
            kvcache=pool,
            page_size=PAGE_ENTRIES,
        )

    return [call(values, out_loc) for values, out_loc in zip(pooled, out_locs, strict=True)]


def prefill_plan(tokens: int, ratio: int) -> Any:
    """SGLang's compress plan of one request that prefills `tokens` tokens."""
    from sglang.kernels.ops.attention.dsv4 import CompressorPrefillPlan

    page = 256
    location = torch.arange(tokens, device="cuda", dtype=torch.int32)[None]
    length = torch.tensor([tokens])
    return CompressorPrefillPlan.generate(
        seq_lens=length,
        extend_lens=length,
        num_q_tokens=tokens,
        compress_ratio=ratio,
        req_pool_indices=torch.zeros(1, dtype=torch.int64, device="cuda"),
        req_to_token=location,
        full_to_state=torch.arange(tokens, device="cuda"),
        swa_page_size=page,
        ring_size=2 * ratio,
    )


def query(queries: Sequence[Tensor], weight: Tensor, scale: float, table: Tensor, positions: Tensor) -> list[Launch]:
    """`fused_q_indexer_rope_hadamard_quant`, a call for each of the queries; positions int32, table complex64."""
    from sglang.kernels.ops.attention.dsv4 import fused_q_indexer_rope_hadamard_quant

    def call(value: Tensor) -> Launch:
        return lambda: fused_q_indexer_rope_hadamard_quant(value, weight, scale, table, positions)

    return [call(value) for value in queries]


def topk(scores: Sequence[Tensor], lengths: Tensor, table: Tensor, count: int) -> list[Launch]:
    """Top-k v2 of `count` entries: entries and pool slots, planned once as a serving step does."""
    from sglang.kernels.ops.attention.dsv4 import plan_topk_v2, topk_transform_paged_v2

    plan = plan_topk_v2(lengths)
    slots = torch.empty(len(lengths), count, dtype=torch.int32, device="cuda")
    entries = torch.empty_like(slots)

    def call(score: Tensor) -> Launch:
        return lambda: topk_transform_paged_v2(score, lengths, table, slots, PAGE_ENTRIES, plan, entries)

    return [call(score) for score in scores]
