"""Triton paged bf16 MQA scores: score[r, e] = sum over heads of weight[r, h] * ReLU(q[r, h] . k[e]).

A program takes one row and a span of its entries, walks the row's page table and keeps keys only in registers and
shared memory: nothing of the size of the gathered keys exists.
"""

import math

import torch
import triton.language as tl
from torch import Tensor

from .interpreter import Kernel, interpreted, load_bf16, loop_bound
from .layout import ENTRY_DIM, PAGE_ENTRIES, check_cache, elements, page_stride_elements

DIM = tl.constexpr(ENTRY_DIM)
PAGE = tl.constexpr(PAGE_ENTRIES)

INTERPRETED_KEYS = 8192
SPLIT_PAGES = 64
DECODE_WARPS = 4
DECODE_STAGES = 5
SMALLEST_DOT = 16
"""Rows that a tensor-core product has at least; fewer heads are padded with zero weights."""


@Kernel
def _paged_scores_kernel(  # type: ignore[no-untyped-def]
    query,
    weight,
    cache,
    page_table,
    request,
    lengths,
    out,
    page_stride,
    table_stride,
    out_stride,
    width,
    split,
    fill,
    HEADS: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    FILL: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * split
    last = tl.minimum(first + split, width)
    length = tl.minimum(tl.maximum(tl.load(lengths + row), 0), width).to(tl.int32)
    table = page_table + tl.load(request + row).to(tl.int64) * table_stride
    head = tl.arange(0, HEAD_BLOCK)
    dim = tl.arange(0, DIM)
    key = tl.arange(0, KEYS)
    head_weight = tl.load(weight + row * HEADS + head, mask=head < HEADS, other=0.0)
    q = load_bf16(query + row * HEADS * DIM + head[:, None] * DIM + dim[None, :], head[:, None] < HEADS, INTERPRETED)
    scores = out + row * out_stride
    for start in tl.range(loop_bound(first), loop_bound(tl.minimum(last, length)), KEYS):
        entry = start + key
        seen = entry < length
        if KEYS == PAGE:
            page = tl.load(table + start // PAGE).to(tl.int64)
            slot = page * page_stride + key * DIM
        else:
            page = tl.load(table + entry // PAGE, mask=seen, other=0).to(tl.int64)
            slot = page * page_stride + entry % PAGE * DIM
        k = load_bf16(cache + slot[None, :] + dim[:, None], seen[None, :], INTERPRETED)
        products = tl.maximum(tl.dot(q, k), 0.0) * head_weight[:, None]
        tl.store(scores + entry, tl.reduce(products, 0, tl.standard._sum_combine), mask=seen)
    if FILL:
        for start in tl.range(loop_bound(tl.maximum(first, length // KEYS * KEYS)), loop_bound(last), KEYS):
            entry = start + key
            tl.store(scores + entry, tl.full((KEYS,), fill, tl.float32), mask=(entry >= length) & (entry < last))


def paged_scores(
    query: Tensor,
    weight: Tensor,
    cache: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    request: Tensor | None = None,
    *,
    width: int | None = None,
    out: Tensor | None = None,
    fill: float | None = -math.inf,
) -> Tensor:
    """Index scores of every row against its request's cached keys, fp32 [R, width].

    query [R, H, 128] bf16, weight [R, H] fp32 (scale of a quantised query folded in), cache uint8 [pages, page stride],
    page_table [N, pages] int32 or int64, lengths [R] int: entries row r sees. request [R] int: the page-table row of
    each row, row r itself when left out. width: columns, at most 64 * pages; the longest length when left out (that
    reads `lengths`, so give it under CUDA graphs). out: fp32 [R, width] to write into, any row stride.

    A length is clamped to [0, width]. Columns past it are set to `fill`; `fill=None` leaves them as they were. Page
    ids of the first ceil(length / 64) table entries must be in the pool; others are never read, nor are keys past the
    length used. ValueError names an argument of the wrong shape or dtype.
    """
    check_cache(cache)
    request = torch.arange(len(query), device=query.device) if request is None else request
    check_scores(query, weight, page_table, lengths, request)
    if width is None:
        width = max(int(lengths.max()), 0) if len(lengths) else 0
    check_width(width, page_table)
    if out is None:
        out = torch.empty(len(query), width, dtype=torch.float32, device=query.device)
    check_out(out, len(query), width)
    if not out.numel():
        return out
    plain = interpreted(query)
    keys = min(INTERPRETED_KEYS, -(-width // PAGE_ENTRIES) * PAGE_ENTRIES) if plain else PAGE_ENTRIES
    keys = 1 << (keys - 1).bit_length()
    split = -(-width // keys) * keys if plain else SPLIT_PAGES * PAGE_ENTRIES
    _paged_scores_kernel[(len(query), -(-width // split))](
        query,
        weight,
        elements(cache),
        page_table,
        request,
        lengths,
        out,
        page_stride_elements(cache),
        page_table.stride(0),
        out.stride(0),
        width,
        split,
        0.0 if fill is None else fill,
        HEADS=query.shape[1],
        HEAD_BLOCK=head_block(query.shape[1]),
        KEYS=keys,
        FILL=fill is not None,
        INTERPRETED=plain,
        num_warps=DECODE_WARPS,
        num_stages=DECODE_STAGES,
    )
    return out


def head_block(heads: int) -> int:
    """Heads padded to what a program multiplies: a power of two, at least 16."""
    return max(SMALLEST_DOT, 1 << (heads - 1).bit_length())


def check_scores(query: Tensor, weight: Tensor, page_table: Tensor, lengths: Tensor, request: Tensor) -> None:
    """Raises ValueError unless the operands have the shapes and dtypes that `paged_scores` names."""
    if query.dtype != torch.bfloat16 or query.dim() != 3 or query.shape[2] != ENTRY_DIM or not query.is_contiguous():
        raise ValueError(f"query is {query.dtype} {list(query.shape)}: give contiguous bf16 [rows, heads, {ENTRY_DIM}]")
    if weight.dtype != torch.float32 or weight.shape != query.shape[:2] or not weight.is_contiguous():
        raise ValueError(f"weight is {weight.dtype} {list(weight.shape)}: give contiguous fp32 {list(query.shape[:2])}")
    if page_table.dim() != 2 or page_table.dtype not in (torch.int32, torch.int64) or page_table.stride(1) != 1:
        raise ValueError(
            f"page_table is {page_table.dtype} {list(page_table.shape)}: give int32 or int64 [requests, pages]"
        )
    for name, index in (("lengths", lengths), ("request", request)):
        if index.shape != query.shape[:1] or index.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{name} is {index.dtype} {list(index.shape)}: give int32 or int64 [{len(query)}]")


def check_width(width: int, page_table: Tensor) -> None:
    """Raises ValueError if `width` columns need more pages than a page-table row names."""
    if width > page_table.shape[1] * PAGE_ENTRIES:
        raise ValueError(
            f"width {width} needs {-(-width // PAGE_ENTRIES)} pages a row, the page table has {page_table.shape[1]}: "
            "widen the table or lower the width"
        )


def check_out(out: Tensor, rows: int, width: int) -> None:
    """Raises ValueError unless `out` is fp32 [rows, width] with contiguous columns."""
    if out.dtype != torch.float32 or out.shape != (rows, width) or (width > 1 and out.stride(1) != 1):
        raise ValueError(f"out is {out.dtype} {list(out.shape)}: give fp32 [{rows}, {width}] with contiguous columns")
