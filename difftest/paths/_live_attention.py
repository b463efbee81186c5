"""SGLang's latent caches and sparse attention: FlashMLA's decode kernel, or its prefill kernel over bf16 latents."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..reference.inputs import LayerInputs
from ..trace import StageTensors, Trace
from ._live_compressor import SYSTEM_PAGE, LiveCompressor
from ._live_feed import latent_parts
from .flashmla_layout import DATA_BYTES, SCALE_BYTES, dequantise, flashmla_pages, pack, unpack
from .planar_pages import PlanarPages

INDEX_ALIGN = 64
"""FlashMLA's decode reads indices in blocks of 64."""
PREFILL_ALIGN = 128
"""Width that SGLang pads the prefill kernel's indices to."""


@dataclass(frozen=True)
class LatentCache:
    """A paged latent cache: its layout, bytes [pages, page bytes] and each latent's slot [n]."""

    layout: PlanarPages
    pool: Tensor
    slots: Tensor

    def view(self) -> Tensor:
        """[pages, page_size, 1, 584]: the shape FlashMLA takes; its padded page stride shows in the strides."""
        width = DATA_BYTES + SCALE_BYTES
        used = self.pool[:, : self.layout.page_size * width]
        return used.view(len(self.pool), self.layout.page_size, 1, width)


def window_cache(inputs: LayerInputs) -> LatentCache:
    """A poisoned window cache of SGLang's 256-token pages, with the window's tokens at shuffled slots."""
    layout, count = flashmla_pages(SYSTEM_PAGE), len(inputs.window_kv)
    pages = -(-count // SYSTEM_PAGE) + 1
    order = torch.randperm(pages * SYSTEM_PAGE, generator=torch.Generator().manual_seed(count))[:count]
    device = inputs.window_kv.device
    return LatentCache(layout, layout.poisoned(pages, device), order.to(device))


def compressed_cache(inputs: LayerInputs) -> LatentCache:
    """A poisoned cache for compressed latents, in pages of 256 tokens: 64 entries (ratio 4) or 2 (ratio 128)."""
    layout = flashmla_pages(SYSTEM_PAGE // inputs.ratio)
    device = inputs.page_table.device
    pages = inputs.num_pages * inputs.page_size // layout.page_size
    return LatentCache(layout, layout.poisoned(pages, device), inputs.entry_slot)


def store_window(inputs: LayerInputs, cache: LatentCache, table: Tensor) -> None:
    """Norm, RoPE, quantise and store of the window's tokens by SGLang's kernel; its norm weight is bf16."""
    from sglang.kernels.ops.attention.dsv4 import fused_k_norm_rope_flashmla

    fused_k_norm_rope_flashmla(
        inputs.window_kv.contiguous(),
        inputs.kv_norm_weight.to(torch.bfloat16),
        inputs.config.rms_norm_eps,
        table,
        inputs.window_position.to(torch.int32),
        cache.slots.to(torch.int32),
        cache.pool,
        cache.layout.page_size,
    )


def latents(inputs: LayerInputs, table: Tensor) -> StageTensors:
    """Tensors of stage `kv`, stored by SGLang's kernels and read back from the pages."""
    window = window_cache(inputs)
    store_window(inputs, window, table)
    out = {"window": _read(window), "window_raw": _raw(window)}
    if inputs.ratio:
        cache, compressor = compressed_cache(inputs), LiveCompressor(inputs)
        compressor.store("main", compressor.pool("main"), table, cache.pool, cache.layout.page_size)
        return {**out, "compressed": _read(cache), "compressed_raw": _raw(cache)}
    return {**out, "compressed": out["window"].new_empty(0, inputs.config.head_dim)}


def _read(cache: LatentCache) -> Tensor:
    return dequantise(*unpack(cache.layout, cache.pool, cache.slots))


def _raw(cache: LatentCache) -> Tensor:
    """Bytes of every latent, uint8 [n, 584]: its data row, then its scale row."""
    return torch.cat(cache.layout.read(cache.pool, cache.slots), -1)


def attention_query(inputs: LayerInputs, table: Tensor) -> Tensor:
    """bf16 [R, A, C]: SGLang's fused per-head norm and RoPE of the attention query."""
    from sglang.kernels.ops.attention.dsv4 import fused_q_norm_rope

    query = inputs.attn_query.contiguous()
    out = torch.full_like(query, math.nan)
    fused_q_norm_rope(query, out, inputs.config.rms_norm_eps, table, inputs.row_position.to(torch.int32))
    return out


def _fill(cache: LatentCache, value: Tensor, name: str) -> LatentCache:
    pack(cache.layout, cache.pool, cache.slots, *latent_parts(value, name))
    return cache


def left_packed(index: Tensor, align: int) -> tuple[Tensor, Tensor]:
    """Valid indices first, in order, then -1: int32 [R, width padded to `align`]; and how many are valid, int32 [R]."""
    order = (index < 0).to(torch.int8).argsort(dim=1, stable=True)
    packed = torch.nn.functional.pad(index.gather(1, order), (0, -index.shape[1] % align), value=-1)
    return packed.to(torch.int32).contiguous(), (index >= 0).sum(1).to(torch.int32)


def selected_entries(inputs: LayerInputs, trace: Trace) -> Tensor:
    """int64 [R, width] request-relative entries that a row attends to, -1 padded: top-k (csa) or all it sees (hca)."""
    if inputs.kind == "csa":
        return trace.value("topk").long()
    visible = inputs.visible
    entry = torch.arange(max(1, int(visible.max())), device=visible.device)
    return torch.where(entry < visible.unsqueeze(1), entry, -1)


def packed_entries(inputs: LayerInputs, selected: Tensor) -> Tensor:
    """Request-relative entries [R, width] as packed entries, -1 kept."""
    offset = torch.tensor(inputs.entry_offset, device=selected.device)[inputs.row_request]
    return torch.where(selected < 0, -1, selected + offset.unsqueeze(1))


def _slots(cache: LatentCache, index: Tensor) -> Tensor:
    """Slots of indices into the cache's latents, -1 kept."""
    return torch.where(index < 0, -1, cache.slots[index.clamp_min(0)])


def decode_attention(inputs: LayerInputs, trace: Trace, table: Tensor) -> StageTensors:
    """`flash_mla_with_kvcache`: every row a batch item, the window in the main cache, entries in the extra one."""
    from sglang.kernels.ops.attention.flash_mla_interface import flash_mla_with_kvcache, get_mla_metadata

    window = _fill(window_cache(inputs), trace["kv"]["window"], "window")
    newest_first = inputs.window_index.flip(1)  # the order in which SGLang lists a decode window
    index, length = left_packed(_slots(window, newest_first), INDEX_ALIGN)
    extra: dict[str, Tensor] = {}
    valid = length.clone()
    if inputs.ratio and inputs.entry_offset[-1]:
        cache = _fill(compressed_cache(inputs), trace["kv"]["compressed"], "compressed")
        slots, count = left_packed(_slots(cache, packed_entries(inputs, selected_entries(inputs, trace))), INDEX_ALIGN)
        valid += count
        extra = {
            "extra_k_cache": cache.view(),
            "extra_indices_in_kvcache": slots.unsqueeze(1),
            "extra_topk_length": count.clamp_min(1),
        }
    output, lse = flash_mla_with_kvcache(
        q=attention_query(inputs, table).unsqueeze(1),
        k_cache=window.view(),
        head_dim_v=inputs.config.head_dim,
        block_table=None,
        cache_seqlens=None,
        tile_scheduler_metadata=get_mla_metadata()[0],
        softmax_scale=inputs.config.softmax_scale,
        is_fp8_kvcache=True,
        indices=index.unsqueeze(1),
        topk_length=length,
        attn_sink=inputs.attn_sink.float().contiguous(),
        **extra,
    )
    return _canonical(output.squeeze(1), lse.squeeze(-1), valid)


def prefill_attention(inputs: LayerInputs, trace: Trace, table: Tensor) -> StageTensors:
    """SGLang's prefill route: latents dequantised to a bf16 workspace, entries first, and `flash_mla_sparse_fwd`."""
    from sglang.kernels.ops.attention.flash_mla_interface import flash_mla_sparse_fwd

    window = _fill(window_cache(inputs), trace["kv"]["window"], "window")
    parts, entries = [], inputs.entry_offset[-1]
    index = [torch.where(inputs.window_index < 0, -1, inputs.window_index + entries)]
    if entries:
        cache = _fill(compressed_cache(inputs), trace["kv"]["compressed"], "compressed")
        parts.append(_workspace(cache))
        index.insert(0, packed_entries(inputs, selected_entries(inputs, trace)))
    combined, length = left_packed(torch.cat(index, 1), PREFILL_ALIGN)
    output, _, lse = flash_mla_sparse_fwd(
        q=attention_query(inputs, table),
        kv=torch.cat([*parts, _workspace(window)]),
        indices=combined.unsqueeze(1),
        sm_scale=inputs.config.softmax_scale,
        d_v=inputs.config.head_dim,
        attn_sink=inputs.attn_sink.float().contiguous(),
        topk_length=length,
    )
    return _canonical(output, lse * math.log(2), length)


def _workspace(cache: LatentCache) -> Tensor:
    """bf16 [n, 1, 512]: the cache's latents dequantised by SGLang's kernel."""
    from sglang.kernels.ops.attention.dsv4.dequant_k_cache import dequantize_k_cache_paged_dsv4

    out: Tensor = dequantize_k_cache_paged_dsv4(cache.pool, cache.slots.to(torch.int32), cache.layout.page_size)
    return out


def _canonical(output: Tensor, lse: Tensor, valid: Tensor) -> StageTensors:
    """fp32 output [R, A, C] and log-sum-exp [R, A]; -inf for a row without any key, where FlashMLA says +inf."""
    nothing = (valid == 0).unsqueeze(1)
    return {"value": output.float(), "lse": lse.float().masked_fill(nothing, -math.inf)}
