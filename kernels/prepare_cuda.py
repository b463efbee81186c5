"""CUDA twins of `store` and `query`: the same arithmetic in one warp-level kernel each, without waiting for Triton.

`store_planned` takes SGLang's compress plans as they are, so a serving step needs nothing but this launch.
"""

import ctypes
from typing import Literal

import torch
from torch import Tensor

from .cuda import index, kernels, pointer
from .layout import check_cache
from .plan import check_plan
from .query import check_query, head_scale
from .rope import as_table
from .store import check_rows

SOURCE = "prepare.cu"
THREADS = 256
LANES = 8
"""Threads of an entry."""


def store(
    pooled: Tensor, norm_weight: Tensor, eps: float, table: Tensor, positions: Tensor, slots: Tensor, cache: Tensor
) -> None:
    """`store.store` in CUDA: same arguments, same result within one rounding of fp32 sums."""
    check_rows(pooled, norm_weight, positions, slots)
    arguments = _store_arguments(pooled, norm_weight, eps, table, cache)
    _launch("store_rows", pooled, len(pooled), *arguments, index(positions), index(slots))


def store_planned(
    pooled: Tensor,
    plan: Tensor,
    norm_weight: Tensor,
    eps: float,
    table: Tensor,
    out_loc: Tensor,
    cache: Tensor,
    *,
    mode: Literal["prefill", "decode"],
    ratio: int = 4,
) -> None:
    """The store of one step by SGLang's plan uint8 [N, 16] (layouts in `plan.py`); rows that are no entry are skipped.

    pooled [N, 128] fp32 as SGLang's compressor leaves it, out_loc int64: slot of each query token (prefill) or of
    each row (decode); the rest as in `store`. ValueError names an argument of the wrong shape, dtype or layout.
    """
    check_plan(plan, len(pooled))
    if out_loc.dtype != torch.int64 or out_loc.dim() != 1 or not out_loc.is_contiguous() or len(out_loc) < len(pooled):
        raise ValueError(
            f"out_loc is {out_loc.dtype} {list(out_loc.shape)}: give contiguous int64 [{len(pooled)} or more]"
        )
    positions = slots = out_loc[: len(pooled)]
    check_rows(pooled, norm_weight, positions, slots)
    arguments = _store_arguments(pooled, norm_weight, eps, table, cache)
    _launch(
        f"store_{mode}_plan", pooled, len(pooled), *arguments, pointer(plan), pointer(out_loc), ctypes.c_int32(ratio)
    )


def prepare_query(
    query: Tensor, weight: Tensor | None, table: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor | None]:
    """`query.prepare_query` in CUDA: index queries bf16 [R, H, 128] and head weights fp32 [R, H] (None for None)."""
    check_query(query, weight, positions)
    out = torch.empty_like(query)
    scaled = None if weight is None else torch.empty(weight.shape, dtype=torch.float32, device=query.device)
    rows, heads = query.shape[:2]
    _launch(
        "prepare_query",
        query,
        rows * heads,
        pointer(query),
        pointer(as_table(table)),
        index(positions),
        pointer(out),
        pointer(weight),
        pointer(scaled),
        ctypes.c_float(head_scale(heads)),
        ctypes.c_int32(heads),
        ctypes.c_int64(rows * heads),
    )
    return out, scaled


def index_query(query: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    """`query.index_query` in CUDA."""
    return prepare_query(query, None, table, positions)[0]


def _store_arguments(
    pooled: Tensor, norm_weight: Tensor, eps: float, table: Tensor, cache: Tensor
) -> tuple[object, ...]:
    check_cache(cache)
    return (
        pointer(pooled),
        pointer(norm_weight),
        pointer(as_table(table)),
        pointer(cache),
        ctypes.c_int64(cache.stride(0)),
        ctypes.c_float(eps),
        ctypes.c_int64(len(pooled)),
    )


def _launch(name: str, on: Tensor, entries: int, *arguments: object) -> None:
    if not on.is_cuda:
        raise ValueError(
            f"{name} is a CUDA kernel and its operands are on {on.device}: move them, or use the Triton one"
        )
    if entries:
        blocks = -(-entries * LANES // THREADS)
        kernels(SOURCE, on.device.index or 0).launch(name, blocks, THREADS, *arguments, overlap=True)
