"""The index pool under the plugin: bytes, shapes, views, and what may move its pages."""

import pytest
import torch
from difftest.kernels.layout import ENTRY_BYTES, PAGE_BYTES
from difftest.kernels.sglang_plugin import pool as plugin_pool
from difftest.kernels.sglang_plugin.switch import PluginError, switched


def test_an_entry_takes_256_bytes_and_an_fp4_one_keeps_its_own(on) -> None:
    bytes_of = on.pools.get_dsv4_indexer_bytes_per_token
    assert bytes_of(128, False) == ENTRY_BYTES and bytes_of(128, True) == 68
    with pytest.raises(PluginError, match="index_head_dim is 64"):
        bytes_of(64, False)
    with switched(False):
        assert bytes_of(128, False) == 132


def test_a_pool_has_rows_of_whole_bf16_pages(on) -> None:
    pool = on.pools.DeepSeekV4TokenToKVPool()
    assert pool.item_bytes() == [PAGE_BYTES, PAGE_BYTES]
    for layer in (2, 4):
        view = pool.get_index_k_with_scale_buffer(layer)
        assert view.dim() == 2 and view.view(len(view), 64, 1, 132).shape == (7, 64, 1, 132)
        rows = plugin_pool.page_rows(view)
        assert rows.shape == (7, PAGE_BYTES) and plugin_pool.layer_of_pages(view) == layer
        assert rows.data_ptr() == pool.index_pools[4].index_k_with_scale_buffer[(layer - 2) // 2].data_ptr()


def test_a_pool_sized_for_fp8_is_refused(on, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on.pools, "get_dsv4_indexer_bytes_per_token", lambda *_: 132)
    with pytest.raises(SystemExit, match="index pages came out as 8448 bytes and bf16 ones take 16384"):
        on.pools.DeepSeekV4TokenToKVPool()


def test_the_fp4_indexer_is_refused_when_the_pool_is_built(on) -> None:
    on.kernel.enable_deepseek_v4_fp4_indexer = True
    with pytest.raises(SystemExit, match="fp4"):
        on.pools.DeepSeekV4TokenToKVPool()


def test_a_draft_model_without_an_indexer_is_served(on) -> None:
    assert on.pools.DeepSeekV4TokenToKVPool((0,)).index_pools == {}


@pytest.mark.parametrize("name", ["get_index_k_scale_buffer", "set_index_k_scale_buffer", "set_index_fused"])
def test_fp8_access_raises_and_says_where(on, name: str) -> None:
    index = on.pools.DeepSeekV4TokenToKVPool().index_pools[4]
    with pytest.raises(PluginError, match="layer 1 of the pool failed: the pool holds bf16 index keys"):
        getattr(index, name)(1, None)


def test_a_peer_with_fp8_keys_has_another_layout(on) -> None:
    pool = on.pools.DeepSeekV4TokenToKVPool()
    assert pool.pd_kv_layout() == "v4,index_k:bf16"
    with switched(False):
        assert pool.pd_kv_layout() == "v4"


def test_the_host_cache_moves_whole_pages(on, sglang) -> None:
    assembler = on.modules["sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler"]
    pool = on.pools.DeepSeekV4TokenToKVPool()
    (region,) = assembler._dsv4_indexer_regions(pool, 256)
    assert region.item_bytes == PAGE_BYTES and region.page_aligned_only


def test_rows_that_lie_wrongly_are_refused() -> None:
    with pytest.raises(ValueError, match="8448 bytes apart and bf16 ones take 16384"):
        plugin_pool.page_rows(torch.zeros(3, 8448, dtype=torch.uint8))
