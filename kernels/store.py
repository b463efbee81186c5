"""Triton store of index keys: RMSNorm, RoPE, Hadamard and one rounding to bf16, written through a slot mapping."""

import torch
import triton.language as tl
from torch import Tensor

from .interpreter import Kernel, interpreted, store_bf16
from .layout import ENTRY_DIM, PAGE_ENTRIES, check_cache, elements, page_stride_elements
from .rope import as_table
from .transform import hadamard, rotate

DIM = tl.constexpr(ENTRY_DIM)
HALF = tl.constexpr(ENTRY_DIM // 2)
PAGE = tl.constexpr(PAGE_ENTRIES)

COMPILED_ROWS = 4
INTERPRETED_ROWS = 4096
STORE_WARPS = 4


@Kernel
def _store_kernel(
    pooled,
    norm_weight,
    table,
    positions,
    slots,
    cache,
    count,
    page_stride,
    eps,
    ROWS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(slots + row, mask=row < count, other=-1).to(tl.int64)
    live = slot >= 0
    position = tl.load(positions + row, mask=live, other=0).to(tl.int64)
    pair = tl.arange(0, HALF)[None, :]
    at = pooled + row.to(tl.int64)[:, None] * DIM + 2 * pair
    even = tl.load(at, mask=live[:, None], other=0.0)
    odd = tl.load(at + 1, mask=live[:, None], other=0.0)
    total = tl.reduce(even * even + odd * odd, 1, tl.standard._sum_combine)
    factor = tl.div_rn(1.0, tl.sqrt_rn(total / DIM + eps))[:, None]
    even = even * factor * tl.load(norm_weight + 2 * pair)
    odd = odd * factor * tl.load(norm_weight + 2 * pair + 1)
    even, odd = rotate(even, odd, table, position, live)
    even, odd = hadamard(even, odd, ROWS)
    target = cache + (slot // PAGE * page_stride + slot % PAGE * DIM)[:, None] + 2 * pair
    store_bf16(target, even, live[:, None], INTERPRETED)
    store_bf16(target + 1, odd, live[:, None], INTERPRETED)


def store(
    pooled: Tensor, norm_weight: Tensor, eps: float, table: Tensor, positions: Tensor, slots: Tensor, cache: Tensor
) -> None:
    """Writes index keys into the paged cache; a negative slot skips its row, and nothing outside the slots is touched.

    pooled [E, 128] fp32, norm_weight [128] fp32, table fp32 [P, 64] or complex64 [P, 32], positions [E] int (rows of
    the table), slots [E] int, cache uint8 [pages, page stride]. Order: norm, rotation of dims 64..127, Hadamard, bf16
    (contract K4 of the DeepSeek-V4 indexer). ValueError names an argument of the wrong shape, dtype or layout.
    """
    table = as_table(table)
    check_cache(cache)
    check_rows(pooled, norm_weight, positions, slots)
    if not len(pooled):
        return
    plain = interpreted(pooled)
    rows = INTERPRETED_ROWS if plain else COMPILED_ROWS
    _store_kernel[(-(-len(pooled) // rows),)](
        pooled,
        norm_weight,
        table,
        positions,
        slots,
        elements(cache),
        len(pooled),
        page_stride_elements(cache),
        eps,
        ROWS=rows,
        INTERPRETED=plain,
        num_warps=STORE_WARPS,
    )


def check_rows(pooled: Tensor, norm_weight: Tensor, positions: Tensor, slots: Tensor) -> None:
    """Raises ValueError unless the operands of a store have the shapes and dtypes that `store` names."""
    if pooled.dtype != torch.float32 or pooled.dim() != 2 or pooled.shape[1] != ENTRY_DIM or not pooled.is_contiguous():
        raise ValueError(f"pooled is {pooled.dtype} {list(pooled.shape)}: give contiguous fp32 [entries, {ENTRY_DIM}]")
    if norm_weight.dtype != torch.float32 or norm_weight.shape != (ENTRY_DIM,):
        raise ValueError(f"norm_weight is {norm_weight.dtype} {list(norm_weight.shape)}: give fp32 [{ENTRY_DIM}]")
    for name, index in (("positions", positions), ("slots", slots)):
        right = index.shape == pooled.shape[:1] and index.dtype in (torch.int32, torch.int64)
        if not right or not index.is_contiguous():
            raise ValueError(
                f"{name} is {index.dtype} {list(index.shape)}: give contiguous int32 or int64 [{len(pooled)}]"
            )
