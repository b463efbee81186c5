"""What a step does with index keys: store, query, scores; each in the place of SGLang's fp8 operator."""

import math
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from .. import plan as plans
from .. import prepare_cuda
from .. import query as triton_query
from .. import score as scorer
from .. import store as triton_store
from ..cuda import find_nvcc
from ..layout import ENTRY_DIM, PAGE_ENTRIES, elements
from ..query import head_scale
from .pool import layer_of_pages, page_rows
from .switch import PASS_ON, guarded

SCORE_COLUMNS = 256
"""Score rows start at multiples of this many columns, as DeepGEMM's do."""


class GatheredKeys(NamedTuple):
    """Keys of one request as `gather_keys` leaves them: bf16 [whole pages * 64, 128], and their layer."""

    keys: Tensor
    layer: int


@cache
def has_nvcc() -> bool:
    """Whether the CUDA kernels can be built here; the Triton ones take their place otherwise."""
    return find_nvcc() is not None


def _layer_of_store(*_: Any, kvcache: Tensor, **__: Any) -> int | None:
    return layer_of_pages(kvcache)


@guarded("the index-K store", _layer_of_store)
def store(
    kv: Tensor,
    plan: Any,
    *,
    norm_weight: Tensor,
    norm_eps: float,
    freq_cis: Tensor,
    out_loc: Tensor,
    kvcache: Tensor,
    page_size: int,
    **options: Any,
) -> Any:
    """AROUND `compress_norm_rope_store`: index keys as bf16; latents, which are wider, pass on to SGLang's kernel.

    kv fp32 [N, 128] with a plan of N rows, out_loc int [tokens]; rows that are no entry are skipped.
    """
    if kv.shape[-1] != ENTRY_DIM:
        return PASS_ON
    if options.get("use_fp4") or options.get("bf16_store") or page_size != PAGE_ENTRIES:
        raise ValueError(f"a store of pages of {page_size} entries with {options} is none of bf16 index keys")
    cache, rows = page_rows(kvcache), plan[1]
    slots = out_loc if out_loc.dtype == torch.int64 else out_loc.long()
    mode: Literal["prefill", "decode"] = "decode" if plan.is_decode else "prefill"
    if kv.is_cuda and has_nvcc():
        prepare_cuda.store_planned(
            kv, rows, norm_weight, norm_eps, freq_cis, slots, cache, mode=mode, ratio=plan.compress_ratio
        )
        return None
    of_rows = plans.decode_rows if plan.is_decode else plans.prefill_rows
    positions, entry_slots = of_rows(rows, slots[: len(kv)] if plan.is_decode else slots, plan.compress_ratio)
    triton_store.store(kv, norm_weight, norm_eps, freq_cis, positions, entry_slots, cache)
    return None


def _layer_of_indexer(indexer: Any, *_: Any, **__: Any) -> int:
    return int(indexer.layer_id)


@guarded("the index query", _layer_of_indexer)
def compute_query(indexer: Any, q_lora: Tensor, positions: Tensor, weight: Tensor, q_lora_quant: Any = None) -> Any:
    """AROUND `C4Indexer.compute_q`: (bf16 [T, H, 128], fp32 [T, H, 1]), with no scale of a query in the head weight."""
    projected, _ = indexer.wq_b(q_lora if q_lora_quant is None else q_lora_quant)
    query = projected.view(-1, indexer.n_local_heads, indexer.head_dim).contiguous()
    if not math.isclose(indexer.weight_scale, head_scale(query.shape[1]), rel_tol=1e-9):
        raise ValueError(
            f"head weights are scaled by {indexer.weight_scale} and the kernel by {head_scale(query.shape[1])}"
        )
    kernel = prepare_cuda if query.is_cuda and has_nvcc() else triton_query
    rotated, scaled = kernel.prepare_query(query, weight.contiguous(), indexer.freqs_cis, positions.contiguous())
    return rotated, scaled.unsqueeze(-1)


def _layer_of_scores(_: Tensor, kv_cache: Tensor, *__: Any, **___: Any) -> int | None:
    return layer_of_pages(kv_cache)


@guarded("the index scores", _layer_of_scores)
def paged_scores(
    q: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: Any,
    max_context_len: int,
    clean_logits: bool = False,
    *_: Any,
) -> Tensor:
    """AROUND `deep_gemm.fp8_paged_mqa_logits`: fp32 [B * next_n, max_context_len], columns past a length unwritten.

    q bf16 [B, next_n, H, 128], kv_cache a view of whole page rows, context_lens int32 [B, next_n], block_table int32
    [B, pages]. Nothing is read on the host, so that a captured graph replays with the lengths of its step.
    """
    if q.dtype != torch.bfloat16:
        raise ValueError(f"the query is {q.dtype} and not bf16: the hook on compute_q was bypassed")
    if clean_logits:
        raise ValueError("clean_logits is set, which SGLang's indexer never does")
    next_n = q.shape[1]
    return scorer.paged_scores(
        q.flatten(0, 1).contiguous(),
        weights.contiguous(),
        page_rows(kv_cache),
        block_table,
        context_lens.flatten(),
        width=max_context_len,
        out=_score_rows(len(q) * next_n, max_context_len, q.device),
        fill=None,
        next_n=next_n,
    )


def _layer_of_gather(*, c4_indexer: Any, **_: Any) -> int:
    return int(c4_indexer.layer_id)


@guarded("the gather of index keys", _layer_of_gather)
def gather_keys(*, c4_indexer: Any, token_to_kv_pool: Any, plan: Any) -> GatheredKeys:
    """AROUND `_gather_nonpaged_index_k`: whole pages of the plan's one request, in order."""
    view = token_to_kv_pool.get_index_k_with_scale_buffer(layer_id=c4_indexer.layer_id)
    pages = plan.page_table[0, : plan.max_seqlen_k // PAGE_ENTRIES]
    return GatheredKeys(elements(page_rows(view))[pages].view(-1, ENTRY_DIM), c4_indexer.layer_id)


def _layer_of_gathered(*, kv: Any, **_: Any) -> int | None:
    return kv.layer if isinstance(kv, GatheredKeys) else None


@guarded("the scores of gathered index keys", _layer_of_gathered)
def gathered_scores(*, q_indexer: Tensor, weights: Tensor, kv: Any, plan: Any, rows: slice) -> Tensor:
    """AROUND `_nonpaged_mqa_logits`: fp32 [rows, max_seqlen_k] of one chunk of rows; an empty range writes nothing."""
    query = q_indexer[rows]
    return scorer.contiguous_scores(
        query,
        weights[rows].contiguous(),
        kv.keys,
        plan.ke[rows],
        width=plan.max_seqlen_k,
        out=_score_rows(len(query), plan.max_seqlen_k, query.device),
        fill=None,
    )


def _score_rows(rows: int, width: int, device: torch.device) -> Tensor:
    """Uninitialised fp32 [rows, width] whose rows start at multiples of SCORE_COLUMNS columns."""
    aligned = -(-width // SCORE_COLUMNS) * SCORE_COLUMNS
    return torch.empty(rows, aligned, dtype=torch.float32, device=device)[:, :width]
