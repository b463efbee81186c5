"""The Hopper kernels of index scores: the products of `score.py` at the rate of the tensor cores and of the memory.

One launch each, persistent, no host read, nothing allocated. Their twin for every other GPU, for other numbers of heads
and other runs of rows is the Triton kernel of `score_kernel.py`; all sum in fp32, in orders of their own.
"""

import ctypes
import os
from dataclasses import dataclass
from functools import cache, lru_cache

import torch
from torch import Tensor

from .cuda import Index, architecture, check, driver, find_nvcc, index, kernels, pointer
from .layout import ELEMENT_BYTES, ENTRY_DIM, PAGE_ENTRIES

HEADS = 64
MOST_GROUPS = 4096
"""Groups of rows whose lengths a block scans at once."""
SWITCH = "DIFFTEST_KERNELS_HOPPER"
"""Environment variable; 0 leaves every read to Triton."""
SHARED_BYTES = 231424


@dataclass(frozen=True)
class Kernel:
    """One of the kernels: `group` consecutive rows of one request share its keys; a copy brings `box` of them, or
    `key_box` keys."""

    source: str
    name: str
    group: int
    box: int
    key_box: int
    threads: int


DECODE_ONE = Kernel("decode.cu", "decode_one", 1, 1, 16, 640)
DECODE_TWO = Kernel("decode.cu", "decode_two", 2, 2, 16, 512)
PREFILL_TWO = Kernel("prefill.cu", "prefill_two", 8, 4, 64, 384)
PREFILL_FOUR = Kernel("prefill.cu", "prefill_four", 8, 2, 64, 640)

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
    """Whether these kernels can be built for and run on `device`."""
    if device.type != "cuda" or os.environ.get(SWITCH) == "0":
        return False
    return architecture(torch.cuda.get_device_capability(device)) == "90a" and find_nvcc() is not None


@cache
def multiprocessors(device: int) -> int:
    """Multiprocessors of a CUDA device."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def kernel_for(query: Tensor, next_n: int, prefill: Kernel = PREFILL_TWO) -> Kernel | None:
    """The kernel that takes `query` [R, H, 128] in runs of `next_n` rows a request; None if none does.

    prefill: which of the two to take for long runs.
    """
    rows, heads = query.shape[:2]
    if heads != HEADS or not available(query.device):
        return None
    runs = min(next_n, rows)
    if runs <= DECODE_TWO.group:
        found = DECODE_TWO if runs == DECODE_TWO.group else DECODE_ONE
    elif next_n >= rows or next_n % prefill.group == 0:
        found = prefill
    else:
        return None
    return found if rows <= MOST_GROUPS * found.group else None


def launch(
    kernel: Kernel,
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
        key_map = tensor_map(keys.data_ptr(), len(keys), 1, ENTRY_DIM * len(keys), kernel.key_box)
    else:
        key_map = tensor_map(keys.data_ptr(), PAGE_ENTRIES, len(keys), page_stride, kernel.key_box)
    none = Index(None, 0)
    kernels(kernel.source, device).launch(
        kernel.name,
        multiprocessors(device),
        kernel.threads,
        tensor_map(query.data_ptr(), rows * HEADS, 1, ENTRY_DIM * rows * HEADS, kernel.box * HEADS),
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
        ctypes.c_int32(-(-rows // kernel.group)),
        ctypes.c_int32(width),
        ctypes.c_float(0.0 if fill is None else fill),
        ctypes.c_int32(fill is not None),
        shared=SHARED_BYTES,
    )


@lru_cache(maxsize=1024)
def tensor_map(address: int, rows: int, pages: int, stride: int, box_rows: int) -> TensorMap:
    """Copies of [box_rows, 64] bf16, swizzled in rows of 128 bytes, out of pages of `rows` rows of 128 elements.

    stride: elements between pages. Rows past the end read as zero. Remembered: a description holds for its address.
    """
    buffer = (ctypes.c_ubyte * (TENSOR_MAP_BYTES + TENSOR_MAP_ALIGNMENT))()
    at = -ctypes.addressof(buffer) % TENSOR_MAP_ALIGNMENT
    code = driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(ctypes.addressof(buffer) + at),
        BFLOAT16,
        RANK,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * RANK)(ENTRY_DIM, rows, pages),
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
