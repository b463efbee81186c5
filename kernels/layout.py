"""Byte layout of the paged bf16 index-K cache, and the shape rules of one entry.

Page of 64 entries, no scales:

    byte 0            256             512                16,384             page stride
    | entry 0 (128 bf16) | entry 1 | ... | entry 63        | padding, never read or written |

A pool is `uint8 [pages, page stride]`. Slot s is entry s % 64 of page s // 64. The page stride is a multiple of 16
bytes and at least the 16,384 bytes of payload, so a pool may keep other data behind each page. Byte offsets pass 2^31
from page 131,072 on and element offsets from page 262,144 on: every kernel computes them in 64 bits.
"""

import torch
from torch import Tensor

PAGE_ENTRIES = 64
ENTRY_DIM = 128
ROPE_DIM = 64
ELEMENT_BYTES = 2
ENTRY_BYTES = ENTRY_DIM * ELEMENT_BYTES
PAGE_BYTES = PAGE_ENTRIES * ENTRY_BYTES
STRIDE_ALIGNMENT = 16
NO_SLOT = -1
POISON_BYTE = 0xFF
"""Fills unwritten bytes in tests: two of them are a bf16 NaN."""


def empty_cache(
    pages: int, device: str | torch.device = "cpu", page_stride: int = PAGE_BYTES, fill: int | None = None
) -> Tensor:
    """A pool, uint8 [pages, page_stride] (bytes), uninitialised or filled with the byte `fill`."""
    cache = torch.empty(pages, page_stride, dtype=torch.uint8, device=device)
    check_cache(cache)
    return cache if fill is None else cache.fill_(fill)


def check_cache(cache: Tensor) -> None:
    """Raises ValueError unless `cache` is uint8 [pages, bytes] with rows of 16,384 contiguous bytes and an aligned
    page stride.
    """
    if cache.dtype != torch.uint8 or cache.dim() != 2:
        raise ValueError(
            f"cache is {cache.dtype} {list(cache.shape)}, the pool is uint8 [pages, page stride]: view it so"
        )
    if cache.shape[1] < PAGE_BYTES or cache.stride(1) != 1:
        raise ValueError(
            f"cache rows hold {cache.shape[1]} bytes with inner stride {cache.stride(1)}, a page of {PAGE_ENTRIES} "
            f"bf16 entries needs {PAGE_BYTES} contiguous ones: allocate it with empty_cache"
        )
    if cache.stride(0) % STRIDE_ALIGNMENT or cache.data_ptr() % STRIDE_ALIGNMENT:
        raise ValueError(
            f"page stride {cache.stride(0)} or base address is not a multiple of {STRIDE_ALIGNMENT} bytes, which "
            "vector loads need: pad the pages"
        )


def elements(cache: Tensor) -> Tensor:
    """The payload of a pool as bf16 [pages, 8192], sharing memory; the row stride stays the page stride."""
    check_cache(cache)
    return cache[:, :PAGE_BYTES].view(torch.bfloat16)


def page_stride_elements(cache: Tensor) -> int:
    """Bf16 elements between the starts of two pages."""
    return cache.stride(0) // ELEMENT_BYTES


def read_slots(cache: Tensor, slots: Tensor) -> Tensor:
    """Entries at `slots` (int64 [...], each in the pool) as bf16 [..., 128], by plain torch indexing."""
    pages: Tensor = elements(cache).unflatten(1, (PAGE_ENTRIES, ENTRY_DIM))
    return pages[slots // PAGE_ENTRIES, slots % PAGE_ENTRIES]


def write_slots(cache: Tensor, slots: Tensor, entries: Tensor) -> None:
    """Writes bf16 entries [N, 128] at `slots` (int64 [N], each in the pool), by plain torch indexing."""
    pages: Tensor = elements(cache).unflatten(1, (PAGE_ENTRIES, ENTRY_DIM))
    pages[slots // PAGE_ENTRIES, slots % PAGE_ENTRIES] = entries


def move_slots(cache: Tensor, source: Tensor, target: Tensor) -> None:
    """Copies entries between slots of one pool; the sources are read before any target is written."""
    write_slots(cache, target, read_slots(cache, source).clone())


def bytes_per_token(layers: int, ratio: int = 4, entry_bytes: int = ENTRY_BYTES) -> float:
    """Index-K bytes per context token over `layers` sparse layers: one entry per `ratio` tokens and layer."""
    return layers * entry_bytes / ratio
