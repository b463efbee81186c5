"""Index scores of bf16 queries against bf16 keys: score[r, e] = sum over heads of weight[r, h] * ReLU(q[r, h] . k[e]).

`paged_scores` walks a page table and keeps keys only in shared memory: nothing of the size of the gathered keys
exists, and nothing but the scores is allocated. `contiguous_scores` reads keys that lie in one tensor, as a long
prefill has them.
"""

import math
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from . import hopper
from .interpreter import interpreted
from .layout import ENTRY_DIM, PAGE_ENTRIES, check_cache, elements, page_stride_elements
from .score_kernel import scores_kernel
from .tile import PERSISTENT_GROUPS, PREFILL_ROWS, Kind, Tile, choose, portable

FILL_COLUMNS = 1024
SMALLEST_DOT = 16
"""Rows that a tensor-core product has at least; fewer heads are padded with zero weights."""


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
    next_n: int = 1,
    tile: Tile | None = None,
) -> Tensor:
    """Index scores of every row against its request's cached keys, fp32 [R, width].

    query [R, H, 128] bf16, weight [R, H] fp32 (scale of a quantised query folded in), cache uint8 [pages, page stride],
    page_table [N, pages] int32 or int64, lengths [R] int: entries row r sees. request [R] int: the page-table row of
    each row, row r // next_n itself when left out. width: columns, at most 64 * pages; the longest length when left
    out (that reads `lengths`, so give it under CUDA graphs). out: fp32 [R, width] to write into, any row stride.

    next_n: consecutive rows of one request, which then share one read of its keys: 2 for a speculative step of two
    tokens, R for the whole prefill of one request. Rows i * next_n to i * next_n + next_n - 1 belong together.

    A length is clamped to [0, width]. Columns past it are set to `fill`; `fill=None` leaves them as they were. Page
    ids of the first ceil(length / 64) table entries must be in the pool; others are never read, nor are keys past the
    length used. ValueError names an argument of the wrong shape or dtype.
    """
    check_cache(cache)
    check_rows(query, weight, lengths)
    check_table(page_table, request, len(query), next_n)
    out = _output(lengths, width, out)
    if out.shape[1] > page_table.shape[1] * PAGE_ENTRIES:
        raise ValueError(
            f"width {out.shape[1]} needs {-(-out.shape[1] // PAGE_ENTRIES)} pages a row, the page table has "
            f"{page_table.shape[1]}: widen the table or lower the width"
        )
    tile = tile or tile_for("decode" if next_n < PREFILL_ROWS else "prefill", query, out.shape[1], next_n)
    if tile.kernel != "triton":
        _launch_hopper(tile, query, weight, cache, page_table, request, lengths, out, fill, next_n)
        return out
    if next_n % tile.group and len(query) > next_n:
        raise ValueError(f"tile.group {tile.group} does not divide next_n {next_n}: its queries would mix requests")
    _launch(query, weight, cache, page_table, request, lengths, out, fill, next_n, tile)
    return out


def contiguous_scores(
    query: Tensor,
    weight: Tensor,
    keys: Tensor,
    lengths: Tensor,
    *,
    width: int | None = None,
    out: Tensor | None = None,
    fill: float | None = -math.inf,
    tile: Tile | None = None,
) -> Tensor:
    """Index scores of the rows of one request against its keys, fp32 [R, width]; row r sees keys 0 to lengths[r] - 1.

    keys [E, 128] bf16, contiguous; the rest as in `paged_scores`. A tile serves several consecutive rows and stops at
    the longest of them, so causal rows cost half of full ones. A length is clamped to [0, width], width to at most E.
    """
    if keys.dtype != torch.bfloat16 or keys.dim() != 2 or keys.shape[1] != ENTRY_DIM or not keys.is_contiguous():
        raise ValueError(f"keys is {keys.dtype} {list(keys.shape)}: give contiguous bf16 [entries, {ENTRY_DIM}]")
    check_rows(query, weight, lengths)
    out = _output(lengths, width, out)
    if out.shape[1] > len(keys):
        raise ValueError(f"width {out.shape[1]} is more than the {len(keys)} keys: lower the width or the lengths")
    tile = tile or tile_for("prefill", query, out.shape[1], len(query))
    if tile.kernel != "triton":
        _launch_hopper(tile, query, weight, keys, None, None, lengths, out, fill, max(1, len(query)))
        return out
    _launch(query, weight, keys, None, None, lengths, out, fill, max(1, len(query)), tile)
    return out


def tile_for(kind: Kind, query: Tensor, width: int, next_n: int) -> Tile:
    """The tile of a read of these operands: recorded or default, Triton's where Hopper's kernels do not serve."""
    tile = choose(kind, len(query), width, next_n, query.device)
    if tile.kernel != "triton" and hopper.kernel_for(query, next_n) is None:
        return portable(kind, next_n, query.device)
    return tile


def _launch_hopper(
    tile: Tile,
    query: Tensor,
    weight: Tensor,
    keys: Tensor,
    page_table: Tensor | None,
    request: Tensor | None,
    lengths: Tensor,
    out: Tensor,
    fill: float | None,
    next_n: int,
) -> None:
    if not out.numel():
        return
    stride = page_stride_elements(keys) if page_table is not None else None
    payload = elements(keys) if page_table is not None else keys
    prefill = hopper.PREFILL_FOUR if tile.kernel == "hopper four" else hopper.PREFILL_TWO
    kernel = hopper.kernel_for(query, next_n, prefill)
    if kernel is None:
        raise ValueError(
            f"the Hopper kernels take 64 heads and runs of 1, 2 or 8 n rows on a Hopper GPU with nvcc, not "
            f"{list(query.shape)} in runs of {next_n} on {query.device}: leave `tile` out"
        )
    hopper.launch(kernel, query, weight, payload, stride, page_table, request, lengths, out, fill, next_n)


def _launch(
    query: Tensor,
    weight: Tensor,
    keys: Tensor,
    page_table: Tensor | None,
    request: Tensor | None,
    lengths: Tensor,
    out: Tensor,
    fill: float | None,
    next_n: int,
    tile: Tile,
) -> None:
    rows, width = out.shape
    if not out.numel():
        return
    plain, paged = interpreted(query), page_table is not None
    step = max(PAGE_ENTRIES, min(tile.keys, 1 << (width - 1).bit_length()) if plain else tile.keys)
    groups, blocks = -(-rows // tile.group), -(-width // step)
    persistent = tile.programs > 0 and (plain or groups <= PERSISTENT_GROUPS)
    grid = (_programs(query.device, tile, groups * blocks), 1) if persistent else (groups, -(-blocks // tile.split))
    scores_kernel[grid](
        query,
        weight,
        _keys_argument(keys, paged, tile),
        page_table,
        request,
        lengths,
        out,
        rows,
        groups,
        page_stride_elements(keys) if paged else 0,
        page_table.stride(0) if page_table is not None else 0,
        out.stride(0),
        width,
        min(tile.split, blocks),
        0.0 if fill is None else float(fill),
        HEADS=query.shape[1],
        HEAD_BLOCK=max(SMALLEST_DOT, 1 << (query.shape[1] - 1).bit_length()),
        GROUP=tile.group,
        NEXT_N=next_n if paged and request is None else 1,  # read only where rows find their request by number
        KEYS=step,
        GROUP_BLOCK=max(SMALLEST_DOT, 1 << (groups - 1).bit_length()) if persistent else 1,
        PERSISTENT=persistent,
        PAGED=paged,
        FILL=0 if fill is None else max(FILL_COLUMNS, step),
        DESCRIPTOR=tile.descriptor and paged and not plain,
        INTERPRETED=plain,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def _programs(device: torch.device, tile: Tile, most: int) -> int:
    """Persistent programs of a launch: no more than there are blocks of keys."""
    return min(most, tile.programs * (1 if device.type == "cpu" else hopper.multiprocessors(device.index or 0)))


def _keys_argument(keys: Tensor, paged: bool, tile: Tile) -> Any:
    """The keys as the kernel takes them: a pointer, or a descriptor of pages [pages, 64, 128]."""
    if not paged:
        return keys
    payload = elements(keys)
    if not tile.descriptor or not keys.is_cuda:
        return payload
    strides = [page_stride_elements(keys), ENTRY_DIM, 1]
    return TensorDescriptor(payload, [len(keys), PAGE_ENTRIES, ENTRY_DIM], strides, [1, PAGE_ENTRIES, ENTRY_DIM])


def _output(lengths: Tensor, width: int | None, out: Tensor | None) -> Tensor:
    """`out`, checked, or a new fp32 [R, width]."""
    if width is None:
        width = out.shape[1] if out is not None else int(lengths.max().clamp_min(0)) if len(lengths) else 0
    if out is None:
        return torch.empty(len(lengths), width, dtype=torch.float32, device=lengths.device)
    if out.dtype != torch.float32 or out.shape != (len(lengths), width) or (width > 1 and out.stride(1) != 1):
        raise ValueError(
            f"out is {out.dtype} {list(out.shape)}: give fp32 [{len(lengths)}, {width}] with contiguous columns"
        )
    return out


def check_rows(query: Tensor, weight: Tensor, lengths: Tensor) -> None:
    """Raises ValueError unless queries, weights and lengths have the shapes and dtypes that `paged_scores` names."""
    if query.dtype != torch.bfloat16 or query.dim() != 3 or query.shape[2] != ENTRY_DIM or not query.is_contiguous():
        raise ValueError(f"query is {query.dtype} {list(query.shape)}: give contiguous bf16 [rows, heads, {ENTRY_DIM}]")
    if weight.dtype != torch.float32 or weight.shape != query.shape[:2] or not weight.is_contiguous():
        raise ValueError(f"weight is {weight.dtype} {list(weight.shape)}: give contiguous fp32 {list(query.shape[:2])}")
    check_index("lengths", lengths, len(query))


def check_table(page_table: Tensor, request: Tensor | None, rows: int, next_n: int) -> None:
    """Raises ValueError unless page table and requests fit `rows` rows in runs of `next_n`."""
    if page_table.dim() != 2 or page_table.dtype not in (torch.int32, torch.int64) or page_table.stride(1) != 1:
        raise ValueError(
            f"page_table is {page_table.dtype} {list(page_table.shape)}: give int32 or int64 [requests, pages]"
        )
    if next_n < 1 or (rows > next_n and rows % next_n):
        raise ValueError(f"next_n {next_n} does not divide the {rows} rows: every request has next_n rows")
    if request is not None:
        check_index("request", request, rows)
    elif page_table.shape[0] < -(-rows // next_n):
        raise ValueError(
            f"page_table has {page_table.shape[0]} rows for {-(-rows // next_n)} requests: add rows, or give `request`"
        )


def check_index(name: str, index: Tensor, rows: int) -> None:
    """Raises ValueError unless `index` is contiguous int32 or int64 [rows]."""
    if index.shape != (rows,) or index.dtype not in (torch.int32, torch.int64) or not index.is_contiguous():
        raise ValueError(f"{name} is {index.dtype} {list(index.shape)}: give contiguous int32 or int64 [{rows}]")
