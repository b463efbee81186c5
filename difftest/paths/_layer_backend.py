"""SGLang's own attention backend and token pool, stood up for one layer without a server or a model.

The model runner that they read is the one of SGLang's attention test kit, with pools of the case's size in its place.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..reference.inputs import LayerInputs
from ._layer_keys import index_pages
from ._live_compressor import RING_ROWS, SYSTEM_PAGE, LiveCompressor
from .planar_pages import POISON

LAYER = 0
"""The only layer of the pool."""


@dataclass(frozen=True)
class Backend:
    """A stood-up layer.

    backend       SGLang's `DeepseekV4AttnBackend`.   pool  its `DeepSeekV4TokenToKVPool`, poisoned.
    runner        what both take for a model runner.
    req_to_token  [N, longest] int32 full locations.   full_to_swa  [locations] int64, pages shuffled.
    """

    backend: Any
    pool: Any
    runner: Any
    req_to_token: Tensor
    full_to_swa: Tensor


def token_locations(inputs: LayerInputs) -> tuple[Tensor, int]:
    """Full locations of every token [N, longest] int32, and how many there are; pages are shuffled."""
    if inputs.ratio:
        compressor = LiveCompressor(inputs)
        return compressor.req_to_token, compressor.locations
    device, count = inputs.window_kv.device, len(inputs.lengths)
    pages = -(-max(inputs.lengths) // SYSTEM_PAGE)
    order = torch.randperm(count * pages, generator=torch.Generator().manual_seed(count)) + 1
    position = torch.arange(pages * SYSTEM_PAGE)
    table = order.view(count, pages)[:, position // SYSTEM_PAGE] * SYSTEM_PAGE + position % SYSTEM_PAGE
    return table.to(torch.int32).to(device), (count * pages + 1) * SYSTEM_PAGE


def shuffled_pages(locations: int, device: torch.device) -> Tensor:
    """int64 [locations]: a permutation of pages of SYSTEM_PAGE; page 0, which SGLang reserves, stays."""
    pages = locations // SYSTEM_PAGE
    order = torch.cat(
        (
            torch.zeros(1, dtype=torch.int64),
            1 + torch.randperm(pages - 1, generator=torch.Generator().manual_seed(pages)),
        )
    )
    location = torch.arange(locations)
    return (order[location // SYSTEM_PAGE] * SYSTEM_PAGE + location % SYSTEM_PAGE).to(device)


def stand_up(inputs: LayerInputs, topk: str) -> Backend:
    """Pools and backend for `inputs`; topk `torch` selects SGLang's torch fallback."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.layers.attention.dsa.dsa_topk_backend import DSATopKBackend

    table, locations = token_locations(inputs)
    mapping = shuffled_pages(locations, table.device)
    runner = _runner(inputs, table)
    runner.token_to_kv_pool = _pool(inputs, locations)
    runner.token_to_kv_pool.register_mapping(mapping)
    runner.kv_index_translator = _translator(runner)
    backend = ATTENTION_BACKENDS["dsv4"](runner)
    if topk == "torch":
        backend.dsa_topk_backend = DSATopKBackend.TORCH
    return Backend(backend, runner.token_to_kv_pool, runner, table, mapping)


def _runner(inputs: LayerInputs, table: Tensor) -> Any:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.test.kits.attention_unittest.attention_methods import dsv4_attention as kit

    heads, requests, longest = inputs.config.num_attention_heads, *table.shape
    model = kit.TinyDSV4ModelConfig(num_heads=heads, context_len=longest, compression_ratios=[inputs.ratio])
    model.hf_config.index_topk = inputs.config.index_topk
    case = kit.DSV4AttentionCase(
        name="difftest",
        backend="dsv4",
        forward_mode=ForwardMode.EXTEND,
        num_heads=heads,
        page_size=SYSTEM_PAGE,
        prefix_lens=(0,) * requests,
        extend_lens=(1,) * requests,
    )
    runner = kit.MockDSV4ModelRunner(
        case=case,
        model_config=model,
        dtype=torch.bfloat16,
        device="cuda",
        max_context_len=longest,
        swa_size=SYSTEM_PAGE,
        compression_ratios=[inputs.ratio],
    )
    runner.req_to_token_pool.req_to_token[:requests] = table
    return runner


def _translator(runner: Any) -> Any:
    from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator

    return KVIndexTranslator(
        req_to_token=runner.req_to_token_pool.req_to_token,
        token_to_kv_pool_allocator=SimpleNamespace(page_size=SYSTEM_PAGE),
        token_to_kv_pool=runner.token_to_kv_pool,
        page_size=SYSTEM_PAGE,
        device="cuda",
    )


def _pool(inputs: LayerInputs, locations: int) -> Any:
    """A pool of `locations` tokens, every byte of its caches and every number of its states poisoned."""
    from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool

    requests, config = len(inputs.lengths), inputs.config
    pool = DeepSeekV4TokenToKVPool(
        max_num_reqs=requests,
        swa_size=locations,
        c4_size=locations // 4,
        c128_size=locations // 128,
        c4_state_pool_size=locations // SYSTEM_PAGE * RING_ROWS[4],
        c128_state_pool_size=requests * RING_ROWS[128],
        page_size=SYSTEM_PAGE,
        swa_page_size=SYSTEM_PAGE,
        dtype=torch.float8_e4m3fn,
        c4_state_dtype=torch.float32,
        c128_state_dtype=torch.float32,
        qk_nope_head_dim=config.head_dim - config.qk_rope_head_dim,
        qk_rope_head_dim=config.qk_rope_head_dim,
        indexer_head_dim=config.index_head_dim,
        layer_num=1,
        device="cuda",
        enable_memory_saver=False,
        compression_ratios=[inputs.ratio],
        full_size=locations,
    )
    pool.get_swa_raw_buffer(LAYER).fill_(POISON)
    if inputs.ratio:
        pool.get_extra_key_buffer(LAYER).view(torch.uint8).fill_(POISON)
        pool.get_attention_compress_states(LAYER).kv_score_buffer.kv_score.fill_(torch.nan)
    if inputs.kind == "csa":
        index_pages(pool).fill_(POISON)
        pool.get_indexer_compress_states(LAYER).kv_score_buffer.kv_score.fill_(torch.nan)
    return pool
