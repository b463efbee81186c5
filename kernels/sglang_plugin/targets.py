"""The table of everything the plugin patches in SGLang, and how a target is found."""

import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import PACKAGE, capture, pool, steps

SRT = "sglang.srt"
POOLS = f"{SRT}.mem_cache.deepseek_v4_memory_pool"
INDEXER = f"{SRT}.layers.attention.dsv4.indexer"
ASSEMBLER = f"{SRT}.mem_cache.hybrid_cache.hybrid_pool_assembler"
BACKEND = f"{SRT}.layers.attention.deepseek_v4_backend.DeepseekV4AttnBackend"


class MissingTarget(RuntimeError):
    """A function that the plugin patches is not there, or takes other arguments; the message names it."""


@dataclass(frozen=True)
class Target:
    """One patched function of SGLang.

    path        its dotted name.        hook    an AROUND hook, `hook(original, *arguments)`.
    takes       parameters that the hook relies on; another signature is refused.
    says        what the patch is for.
    seen_as     a class that inherits the target and through which SGLang calls it, if any: it must not override it.
    """

    path: str
    hook: Callable[..., Any]
    takes: tuple[str, ...]
    says: str
    seen_as: str | None = None

    def resolve(self) -> Any:
        """The function as SGLang would call it now. MissingTarget names the target and what is wrong with it."""
        owner_path, name = self.path.rsplit(".", 1)
        try:
            owner = pkgutil.resolve_name(owner_path)
            found = getattr(owner, name)
        except (ImportError, AttributeError) as error:
            raise MissingTarget(
                f"SGLang has no {self.path}, which {PACKAGE} patches ({self.says}): {error}; install a tested version"
            ) from error
        self._check_signature(found)
        if self.seen_as is not None and getattr(pkgutil.resolve_name(self.seen_as), name) is not found:
            raise MissingTarget(f"{self.seen_as} overrides {self.path}, which {PACKAGE} patches ({self.says})")
        return found

    def _check_signature(self, found: Any) -> None:
        known = inspect.signature(inspect.unwrap(found)).parameters
        missing = [name for name in self.takes if name not in known]
        if missing:
            raise MissingTarget(
                f"{self.path}, which {PACKAGE} patches ({self.says}), takes no {', '.join(missing)}; it takes "
                f"{', '.join(known)}: install a tested version"
            )


BF16_TARGETS = (
    Target(
        f"{SRT}.server_args.ServerArgs.check_server_args", pool.check_arguments, (), "refuse options that do not fit"
    ),
    Target(
        f"{POOLS}.get_dsv4_indexer_bytes_per_token",
        pool.bytes_per_entry,
        ("index_head_dim", "use_fp4_indexer"),
        "256 bytes an entry, for the pool and for the size of the cache",
    ),
    Target(
        f"{POOLS}.DeepSeekV4TokenToKVPool.__init__",
        pool.build,
        ("compression_ratios",),
        "check the pool as built, and say so in the log",
    ),
    Target(
        f"{POOLS}.DeepSeekV4IndexerPool.get_index_k_with_scale_buffer",
        pool.pages_as_sglang_views_them,
        ("layer_id",),
        "pages that the store and the scorer read",
    ),
    *(
        Target(f"{POOLS}.DeepSeekV4IndexerPool.{name}", pool.refuse_fp8, ("layer_id",), "no fp8 access to bf16 pages")
        for name in ("get_index_k_scale_buffer", "set_index_k_scale_buffer", "set_index_fused")
    ),
    Target(
        f"{POOLS}.DeepSeekV4TokenToKVPool.pd_kv_layout", pool.transfer_layout, (), "refuse a peer with fp8 index keys"
    ),
    Target(
        f"{ASSEMBLER}._dsv4_indexer_regions",
        pool.whole_pages_only,
        ("kvcache", "page_size"),
        "host cache: whole pages only",
    ),
    Target(
        f"{SRT}.layers.attention.dsv4.compressor_v2.compress_norm_rope_store",
        steps.store,
        ("kv", "plan", "norm_weight", "norm_eps", "freq_cis", "out_loc", "kvcache", "page_size"),
        "the store: norm, RoPE, Hadamard, bf16",
    ),
    Target(
        f"{INDEXER}.C4Indexer.compute_q",
        steps.compute_query,
        ("q_lora", "positions", "weight", "q_lora_quant"),
        "the bf16 query and its head weights",
    ),
    Target(
        "deep_gemm.fp8_paged_mqa_logits",
        steps.paged_scores,
        ("q", "kv_cache", "weights", "context_lens", "block_table", "schedule_meta", "max_context_len"),
        "scores over pages",
    ),
    Target(
        f"{INDEXER}.C4IndexerBackendMixin._gather_nonpaged_index_k",
        steps.gather_keys,
        ("c4_indexer", "token_to_kv_pool", "plan"),
        "keys gathered once for a long prefill",
        seen_as=BACKEND,
    ),
    Target(
        f"{INDEXER}.C4IndexerBackendMixin._nonpaged_mqa_logits",
        steps.gathered_scores,
        ("q_indexer", "weights", "kv", "plan", "rows"),
        "scores over gathered keys",
        seen_as=BACKEND,
    ),
)

CAPTURE_TARGETS = (
    Target(
        f"{SRT}.models.deepseek_v4.MQALayer._forward_prepare",
        capture.around_layer,
        ("x", "positions", "forward_batch", "attn_backend"),
        "layer inputs of eager steps",
    ),
)
