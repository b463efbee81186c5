"""Builds SGLang's just-in-time operators side by side: a cold start waits for the slowest, not for the sum."""

from functools import lru_cache, partial
from typing import Any

import torch

from ._live_compressor import SYSTEM_PAGE
from ._live_sglang import INDEX_DIM, LATENT_DIM
from .flashmla_layout import ROPE_DIMS


@lru_cache(maxsize=1)
def build_operators() -> str:
    """Builds every operator that `sglang-fp8` calls; returns why not all could be, or an empty string.

    Done once a process. The factories are SGLang's own internals: where another release names them otherwise, each
    operator is simply built when it is first called.
    """
    try:
        from sglang.kernels.jit.utils import parallel_compile

        parallel_compile(_builders())
    except Exception as error:
        return f"operators are built one by one: {error}"
    return ""


def _builders() -> list[Any]:
    from sglang.kernels.ops.attention.dsv4 import compress, norm_rope, topk
    from sglang.kernels.ops.attention.dsv4.kv_layout import KVLayout

    fp32, bf16, layout = torch.float32, torch.bfloat16, KVLayout.V4
    pooling = [
        partial(compress._jit_compress_module, dim, fp32, fp32, fp32, ratio)
        for dim, ratio in ((INDEX_DIM, 4), (LATENT_DIM, 4), (LATENT_DIM, 128))
    ]
    stores = [
        partial(compress._jit_compress_norm_rope_module, fp32, dim, ROPE_DIMS, page, False, layout, False)
        for dim, page in ((INDEX_DIM, 64), (LATENT_DIM, SYSTEM_PAGE // 4), (LATENT_DIM, SYSTEM_PAGE // 128))
    ]
    return [
        topk._jit_topk_v2_module,
        topk._jit_topk_v1_module,
        compress._jit_compress_plan_module,
        *pooling,
        *stores,
        partial(norm_rope._jit_main_q_norm_rope_module, bf16, LATENT_DIM, ROPE_DIMS, True),
        partial(norm_rope._jit_main_k_norm_rope_flashmla_module, bf16, LATENT_DIM, ROPE_DIMS, SYSTEM_PAGE, layout),
        partial(norm_rope._jit_main_q_indexer_rope_hadamard_quant_module, bf16),
    ]
