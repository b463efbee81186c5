"""A small double of the parts of SGLang that the plugin touches, with the behaviour it has to live with."""

import enum
import functools
import pkgutil
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from difftest.kernels.sglang_plugin import install, pool, switch
from difftest.kernels.sglang_plugin.targets import BF16_TARGETS
from torch import Tensor

PAGES, PAGE_ENTRIES, RATIOS = 7, 64, (0, 0, 4, 128, 4)
FP8_BYTES, FP4_BYTES = 132, 68


class HookType(enum.Enum):
    AROUND = "around"


class Registry:
    """As SGLang's: a hook that cannot be applied is logged and skipped."""

    def __init__(self) -> None:
        self.hooks: dict[str, list] = {}
        self.skip: set[str] = set()

    def register(self, target, hook, hook_type) -> None:
        self.hooks.setdefault(target, []).append(hook)

    def apply_hooks(self) -> None:
        for target, hooks in self.hooks.items():
            if target in self.skip:
                continue
            owner_path, name = target.rsplit(".", 1)
            owner = pkgutil.resolve_name(owner_path)
            static = isinstance(vars(owner).get(name), staticmethod)
            function = getattr(owner, name)
            for hook in hooks:
                function = wrapped(function, hook)
            setattr(owner, name, staticmethod(function) if static else function)
        self.hooks.clear()


def wrapped(original_fn, hook):
    @functools.wraps(original_fn)
    def wrapper(*args, **kwargs):
        return hook(original_fn, *args, **kwargs)

    wrapper.__wrapped__ = original_fn
    return wrapper


@dataclass(frozen=True)
class Region:
    item_bytes: int
    page_aligned_only: bool = False


def memory_pool(get_exec) -> types.ModuleType:
    module = types.ModuleType("pools")

    def get_dsv4_indexer_bytes_per_token(index_head_dim: int, use_fp4_indexer: bool) -> int:
        return FP4_BYTES if use_fp4_indexer else FP8_BYTES

    class DeepSeekV4IndexerPool:
        def __init__(self, pages: int, layers: int, use_fp4_indexer: bool = False) -> None:
            self.page_size, self.use_fp4_indexer = PAGE_ENTRIES, use_fp4_indexer
            width = PAGE_ENTRIES * module.get_dsv4_indexer_bytes_per_token(128, use_fp4_indexer)
            self.index_k_with_scale_buffer = [torch.full((pages, width), 255, dtype=torch.uint8) for _ in range(layers)]

        def get_index_k_with_scale_buffer(self, layer_id: int) -> Tensor:
            return self.index_k_with_scale_buffer[layer_id]

        def get_index_k_scale_buffer(self, layer_id: int, *rest):
            return "codes", "scales"

        def set_index_k_scale_buffer(self, layer_id: int, *rest):
            return "written"

        def set_index_fused(self, layer_id: int, *rest):
            return "written"

    class DeepSeekV4TokenToKVPool:
        def __init__(self, compression_ratios: tuple[int, ...] = RATIOS, pages: int = PAGES) -> None:
            layers = [layer for layer, ratio in enumerate(compression_ratios) if ratio == 4]
            self.index_pools = {4: DeepSeekV4IndexerPool(pages, len(layers))} if layers else {}
            self.layer_mapping = [
                (ratio, layers.index(layer) if ratio == 4 else 0, None) if ratio else None
                for layer, ratio in enumerate(compression_ratios)
            ]

        def get_index_k_with_scale_buffer(self, layer_id: int) -> Tensor:
            return self.index_pools[4].get_index_k_with_scale_buffer(self.layer_mapping[layer_id][1])

        def pd_kv_layout(self) -> str:
            return "v4"

        def item_bytes(self) -> list[int]:
            return [buffer[0].nbytes for buffer in self.index_pools[4].index_k_with_scale_buffer]

    module.get_dsv4_indexer_bytes_per_token = get_dsv4_indexer_bytes_per_token
    module.DeepSeekV4IndexerPool = DeepSeekV4IndexerPool
    module.DeepSeekV4TokenToKVPool = DeepSeekV4TokenToKVPool
    return module


def indexer() -> types.ModuleType:
    module = types.ModuleType("indexer")

    class C4Indexer:
        def __init__(self, layer_id: int, query: Tensor, table: Tensor) -> None:
            self.layer_id, self.freqs_cis = layer_id, table
            self.n_local_heads, self.head_dim = query.shape[1:]
            self.weight_scale = float(query.shape[2] ** -0.5 * query.shape[1] ** -0.5)
            self.wq_b = lambda lora: (query.flatten(1), None)

        def compute_q(self, q_lora, positions, weight, q_lora_quant=None):
            return "fp8 query", "folded weight"

    class C4IndexerBackendMixin:
        @staticmethod
        def _gather_nonpaged_index_k(*, c4_indexer, token_to_kv_pool, plan):
            return "fp8 keys"

        @staticmethod
        def _nonpaged_mqa_logits(*, q_indexer, weights, kv, plan, rows):
            return "fp8 scores"

    module.C4Indexer, module.C4IndexerBackendMixin = C4Indexer, C4IndexerBackendMixin
    return module


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The double, importable as `sglang` and `deep_gemm`; its attributes name the parts that tests use."""
    kernel = SimpleNamespace(enable_deepseek_v4_fp4_indexer=False)
    registry = Registry()
    pools, index = memory_pool(lambda: None), indexer()

    def compress_norm_rope_store(
        kv, plan, *, norm_weight, norm_eps, freq_cis, out_loc, kvcache, page_size, use_fp4=False, bf16_store=False
    ):
        return "fp8 store"

    def fp8_paged_mqa_logits(
        q,
        kv_cache,
        weights,
        context_lens,
        block_table,
        schedule_meta,
        max_context_len,
        clean_logits=False,
    ):
        return "fp8 scores"

    class ServerArgs:
        def __init__(self, **given) -> None:
            self.hf_config = SimpleNamespace(architectures=["DeepseekV4ForCausalLM"], compress_ratios=[0, 4, 128])
            self.__dict__.update(given)

        def check_server_args(self) -> str:
            return "checked"

    class DeepseekV4AttnBackend(index.C4IndexerBackendMixin):
        pass

    parts = {
        "sglang.srt.plugins.hook_registry": {"HookRegistry": registry, "HookType": HookType},
        "sglang.srt.server_args": {"ServerArgs": ServerArgs},
        "sglang.srt.arg_groups.model_override_base": {
            "model_config_of": lambda arguments: SimpleNamespace(hf_config=arguments.hf_config)
        },
        "sglang.srt.runtime_context": {"get_exec": lambda: SimpleNamespace(kernel=kernel)},
        "sglang.srt.mem_cache.deepseek_v4_memory_pool": vars(pools),
        "sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler": {
            "_dsv4_indexer_regions": lambda kvcache, page_size: [Region(kvcache.item_bytes()[0])]
        },
        "sglang.srt.layers.attention.dsv4.compressor_v2": {"compress_norm_rope_store": compress_norm_rope_store},
        "sglang.srt.layers.attention.dsv4.indexer": vars(index),
        "sglang.srt.layers.attention.deepseek_v4_backend": {"DeepseekV4AttnBackend": DeepseekV4AttnBackend},
        "deep_gemm": {"fp8_paged_mqa_logits": fp8_paged_mqa_logits},
    }
    for name, contents in parts.items():
        add_module(monkeypatch, name, contents, pools if name.endswith("deepseek_v4_memory_pool") else None)
    monkeypatch.setattr(install, "check_version", lambda: None)
    monkeypatch.setattr(install, "check_device", lambda: None)
    monkeypatch.setattr(install, "warnings", lambda: ())
    monkeypatch.setattr(switch._Switch, "on", False)
    monkeypatch.setattr(pool, "_layers", {})
    yield SimpleNamespace(
        registry=registry, kernel=kernel, pools=pools, indexer=index, server_args=ServerArgs, modules=sys.modules
    )


def add_module(monkeypatch, name: str, contents: dict, module: types.ModuleType | None = None) -> None:
    """Puts a module and its parents into sys.modules, each an attribute of its parent."""
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        path = ".".join(parts[:count])
        if path not in sys.modules or count == len(parts):
            made = module if module is not None and count == len(parts) else types.ModuleType(path)
            monkeypatch.setitem(sys.modules, path, made)
            if count > 1:
                setattr(sys.modules[".".join(parts[: count - 1])], parts[count - 1], made)
    for key, value in contents.items():
        if not key.startswith("__"):
            setattr(sys.modules[name], key, value)


@pytest.fixture
def on(sglang: SimpleNamespace) -> SimpleNamespace:
    """The double with the plugin installed and on, as a server has it."""
    install.register(BF16_TARGETS)
    sglang.registry.apply_hooks()
    switch.turn_on()
    return sglang
