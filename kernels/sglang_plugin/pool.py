"""The index pool: its bytes, what its pages look like from outside, and what may move them.

SGLang sizes the pool, the cache as a whole and every transfer from the bytes of an entry and from the shape of the page
rows, `uint8 [pages, bytes of a page]`. Bf16 rows are 64 x 256 bytes and need no more than that number to be right:
prefill-decode transfers, the host cache and the memory budget follow. What does not follow is done here.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .. import prepare_cuda
from ..cuda import find_nvcc, kernels
from ..layout import ENTRY_BYTES, ENTRY_DIM, PAGE_BYTES, PAGE_ENTRIES
from . import PACKAGE
from .checks import INDEXER_RATIO as RATIO
from .checks import Unsupported, check_model, check_options
from .switch import PASS_ON, guarded, is_on

logger = logging.getLogger(__name__)

FP8_ENTRY_BYTES = 132
"""128 codes and an fp32 scale: the width in which SGLang views a page before it hands it to the scorer."""
LAYOUT_TAG = "index_k:bf16"

_layers: dict[int, int] = {}
"""Layer of each index buffer, by the address of its first page."""


def layer_of_pages(pages: Tensor) -> int | None:
    """Layer whose index pool starts where `pages` does; None for memory of another pool."""
    return _layers.get(pages.data_ptr())


def page_rows(view: Tensor) -> Tensor:
    """The whole page rows, uint8 [pages, 16384], behind any view that begins with page 0 and spans all pages.

    ValueError if the pages do not lie 16,384 bytes apart: then this is no pool of bf16 index keys.
    """
    stride = view.stride(0) * view.element_size()
    if stride != PAGE_BYTES:
        raise ValueError(
            f"index pages lie {stride} bytes apart and bf16 ones take {PAGE_BYTES}: this pool was not sized for bf16"
        )
    return view.view(torch.uint8).as_strided((view.shape[0], PAGE_BYTES), (PAGE_BYTES, 1))


def _no_layer(*_: Any, **__: Any) -> None:
    return None


def _layer_argument(_: Any, layer_id: int, *__: Any, **___: Any) -> str:
    return f"{layer_id} of the pool"


def check_arguments(original: Any, arguments: Any, *rest: Any, **keywords: Any) -> Any:
    """AROUND `ServerArgs.check_server_args`: SystemExit where the arguments do not fit bf16 index keys."""
    result = original(arguments, *rest, **keywords)
    if is_on():
        from sglang.srt.arg_groups.model_override_base import model_config_of

        _refuse(check_options, arguments)
        _refuse(check_model, model_config_of(arguments).hf_config)
    return result


def _refuse(check: Callable[[Any], None], checked: Any) -> None:
    try:
        check(checked)
    except Unsupported as error:
        raise SystemExit(f"{PACKAGE}: {error}") from error


@guarded("the bytes of an index entry", _no_layer)
def bytes_per_entry(index_head_dim: int, use_fp4_indexer: bool) -> Any:
    """AROUND `get_dsv4_indexer_bytes_per_token`: 256 (bytes); fp4 pools, those of DeepSeek-V4.1, keep theirs."""
    if use_fp4_indexer:
        return PASS_ON
    if index_head_dim != ENTRY_DIM:
        raise ValueError(f"index_head_dim is {index_head_dim} and the bf16 kernels are for {ENTRY_DIM}")
    return ENTRY_BYTES


def build(original: Any, pool: Any, *arguments: Any, **keywords: Any) -> None:
    """AROUND `DeepSeekV4TokenToKVPool.__init__`: SystemExit unless the pool as built holds bf16 index keys."""
    if is_on():
        _refuse_fp4()
    original(pool, *arguments, **keywords)
    if is_on():
        check_pool(pool)


def _refuse_fp4() -> None:
    from sglang.srt.runtime_context import get_exec

    _refuse(check_options, get_exec().kernel)


def check_pool(pool: Any) -> None:
    """Raises SystemExit unless every index buffer of `pool` has page rows of 16,384 bytes.

    Registers the layers of its buffers, loads the kernels (never in the middle of a graph capture) and logs the size.
    """
    index = pool.index_pools.get(RATIO)
    if index is None:  # a draft model, or a pipeline stage without such layers
        logger.warning("%s: this pool has no layers of compression ratio %d, and so no index keys", PACKAGE, RATIO)
        return
    if index.page_size != PAGE_ENTRIES:
        raise SystemExit(f"{PACKAGE}: index pages hold {index.page_size} entries and the kernels take {PAGE_ENTRIES}")
    buffers = index.index_k_with_scale_buffer
    for buffer in buffers:
        if buffer.shape[1] != PAGE_BYTES or buffer.stride(0) != PAGE_BYTES:
            raise SystemExit(
                f"{PACKAGE}: index pages came out as {buffer.shape[1]} bytes and bf16 ones take {PAGE_BYTES}: the hook "
                "on the bytes of an entry was bypassed"
            )
    _register(pool, buffers)
    device = buffers[0].device
    if device.type == "cuda" and find_nvcc() is not None:
        kernels(prepare_cuda.SOURCE, device.index or 0)
    logger.warning(
        "%s: bf16 index keys, %d layers x %d pages x %d bytes = %.3f GB (fp8: %.3f GB)",
        PACKAGE,
        len(buffers),
        buffers[0].shape[0],
        PAGE_BYTES,
        len(buffers) * buffers[0].nbytes / 1e9,
        len(buffers) * buffers[0].shape[0] * PAGE_ENTRIES * FP8_ENTRY_BYTES / 1e9,
    )


def _register(pool: Any, buffers: list[Tensor]) -> None:
    for layer, item in enumerate(pool.layer_mapping):
        if item is not None and item[0] == RATIO:
            _layers[buffers[item[1]].data_ptr()] = layer


@guarded("the view of the index pages", _layer_argument)
def pages_as_sglang_views_them(index_pool: Any, layer_id: int) -> Any:
    """AROUND `get_index_k_with_scale_buffer`: the first 64 x 132 bytes of every page row, uint8 [pages, 8448].

    SGLang views the result as [pages, 64, 1, 132] before it passes it on, which whole rows do not allow. No byte is
    read through that view: the store and the scorer take the row stride from it (`page_rows`).
    """
    if index_pool.use_fp4_indexer:
        return PASS_ON
    buffer: Tensor = index_pool.index_k_with_scale_buffer[layer_id]
    return page_rows(buffer)[:, : PAGE_ENTRIES * FP8_ENTRY_BYTES]


@guarded("an fp8 access to the index pool", _layer_argument)
def refuse_fp8(index_pool: Any, *_: Any, **__: Any) -> Any:
    """AROUND the accessors that read or write codes and scales: ValueError, for a bf16 page holds neither."""
    if index_pool.use_fp4_indexer:
        return PASS_ON
    raise ValueError("the pool holds bf16 index keys and no scales")


def transfer_layout(original: Any, pool: Any) -> str:
    """AROUND `pd_kv_layout`: tagged, so that a peer whose index keys are fp8 is refused at the handshake."""
    layout: str = original(pool)
    return f"{layout},{LAYOUT_TAG}" if is_on() else layout


def whole_pages_only(original: Any, kvcache: Any, page_size: int) -> list[Any]:
    """AROUND the host cache's index regions: SGLang's copy of single tokens knows rows of codes and scales only, so
    that bf16 rows move as whole pages; a copy of part of a page raises instead of moving the wrong bytes.
    """
    regions: list[Any] = original(kvcache, page_size)
    if not is_on():
        return regions
    for region in regions:
        if region.item_bytes != PAGE_BYTES:
            raise ValueError(
                f"{PACKAGE}: the host cache would move {region.item_bytes} bytes of an index page of {PAGE_BYTES}"
            )
    return [replace(region, page_aligned_only=True) for region in regions]
