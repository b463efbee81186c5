"""The Hopper kernel of prefill scores: the products of `score.py` at the rate of the tensor cores.

One launch, persistent, no host read, nothing allocated. Its twin for every other GPU, for other numbers of heads and
for decode is the Triton kernel of `score_kernel.py`; both sum in fp32, in orders of their own.
"""

import ctypes
from functools import cache

import torch
from torch import Tensor

from .cuda import Index, architecture, check, driver, find_nvcc, index, kernels, pointer
from .layout import ELEMENT_BYTES, ENTRY_DIM, PAGE_ENTRIES

SOURCE = "prefill.cu"
HEADS = 64
BLOCK_ROWS = 8
"""Consecutive rows that a block serves; they belong to one request."""

MOST_ROWS = 4096 * BLOCK_ROWS
"""Rows of one launch: a block scans the lengths of that many at once."""

THREADS = 384
SHARED_BYTES = 231424
QUERY_BOX = 256
"""Rows of a query tile: four query rows of 64 heads."""

ATOM = 64
"""Elements of a swizzled row of 128 bytes."""

TENSOR_MAP_BYTES = 128
TENSOR_MAP_ALIGNMENT = 64
RANK = 3
BFLOAT16, NO_INTERLEAVE, SWIZZLE_128, PROMOTE_256, FILL_ZERO = 9, 0, 3, 3, 0
"""Enumerators of the CUDA driver's `cuTensorMapEncodeTiled`."""


class TensorMap(ctypes.Structure):
    """A tensor map as a kernel argument."""

    _fields_ = (("bytes", ctypes.c_ubyte * TENSOR_MAP_BYTES),)


@cache
def available(device: torch.device) -> bool:
    """Whether this kernel can be built for and run on `device`."""
    hopper = device.type == "cuda" and architecture(torch.cuda.get_device_capability(device)) == "90a"
    return hopper and find_nvcc() is not None


def serves(query: Tensor, next_n: int) -> bool:
    """Whether this kernel takes `query` [R, H, 128] in runs of `next_n` rows a request."""
    rows, heads = query.shape[:2]
    one_request = next_n >= rows or next_n % BLOCK_ROWS == 0
    return heads == HEADS and rows <= MOST_ROWS and one_request and available(query.device)


def launch(
    query: Tensor,
    weight: Tensor,
    keys: Tensor,
    page_stride: int | None,
    page_table: Tensor | None,
    request: Tensor | None,
    lengths: Tensor,
    out: Tensor,
    fill: float | None,
    next_n: int,
) -> None:
    """Scores of every row into `out`; operands as `score.py` has checked them.

    keys: contiguous bf16 [E, 128] with page_stride and page_table None, else the pool's payload bf16 [pages, 8192]
    whose rows lie `page_stride` elements apart.
    """
    rows, width = out.shape
    device = query.device.index or 0
    if page_stride is None:
        key_map = tensor_map(keys, (len(keys), 1), ENTRY_DIM * len(keys), PAGE_ENTRIES)
    else:
        key_map = tensor_map(keys, (PAGE_ENTRIES, len(keys)), page_stride, PAGE_ENTRIES)
    none = Index(None, 0)
    kernels(SOURCE, device).launch(
        "prefill_scores",
        torch.cuda.get_device_properties(device).multi_processor_count,
        THREADS,
        tensor_map(query, (rows * HEADS, 1), ENTRY_DIM * rows * HEADS, QUERY_BOX),
        key_map,
        pointer(weight),
        index(lengths),
        none if page_table is None else index(page_table),
        ctypes.c_int64(0 if page_table is None else page_table.stride(0)),
        none if request is None else index(request),
        ctypes.c_int64(next_n),
        pointer(out),
        ctypes.c_int64(out.stride(0)),
        ctypes.c_int32(rows),
        ctypes.c_int32(-(-rows // BLOCK_ROWS)),
        ctypes.c_int32(width),
        ctypes.c_float(0.0 if fill is None else fill),
        ctypes.c_int32(fill is not None),
        shared=SHARED_BYTES,
    )


def tensor_map(tensor: Tensor, shape: tuple[int, int], stride: int, box_rows: int) -> TensorMap:
    """Copies of [box_rows, 64] bf16, swizzled in rows of 128 bytes, out of `shape` (rows, pages) of 128 elements.

    stride: elements between pages. Rows past the end read as zero.
    """
    buffer = (ctypes.c_ubyte * (TENSOR_MAP_BYTES + TENSOR_MAP_ALIGNMENT))()
    at = -ctypes.addressof(buffer) % TENSOR_MAP_ALIGNMENT
    code = driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(ctypes.addressof(buffer) + at),
        BFLOAT16,
        RANK,
        ctypes.c_void_p(tensor.data_ptr()),
        (ctypes.c_uint64 * RANK)(ENTRY_DIM, *shape),
        (ctypes.c_uint64 * (RANK - 1))(ENTRY_DIM * ELEMENT_BYTES, stride * ELEMENT_BYTES),
        (ctypes.c_uint32 * RANK)(ATOM, box_rows, 1),
        (ctypes.c_uint32 * RANK)(1, 1, 1),
        NO_INTERLEAVE,
        SWIZZLE_128,
        PROMOTE_256,
        FILL_ZERO,
    )
    check(code, "describing a tensor to the copy engine")
    return TensorMap.from_buffer_copy(buffer, at)
