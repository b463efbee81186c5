"""What the live SGLang paths share: whether they can run here, their rounding points, versions and RoPE tables.

SGLang and its kernel packages are imported inside functions only, so that this module loads on any machine.
"""

import json
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch
from torch import Tensor

from ..reference.config import LayerKind, ModelConfig
from ..stages import StageName
from .base import Availability, CannotFeed, Declaration, Rounding
from .flashmla_layout import NOPE_DIMS, ROPE_DIMS

INSTALL = 'pip install "difftest[sglang]"'
MODULES = ("sglang", "tvm_ffi", "deep_gemm", "flash_mla", "sgl_kernel")
"""What SGLang's DeepSeek-V4 operators import; `tvm_ffi` loads first, `deep_gemm` links against it without an rpath."""

DISTRIBUTIONS = ("sglang", "sgl-deep-gemm", "sgl-flash-mla", "sglang-kernel", "apache-tvm-ffi", "torch", "triton")
ARCHITECTURES = {9: "Hopper", 10: "Blackwell"}
"""Compute capabilities (major) for which DeepGEMM's fp8 MQA scores and FlashMLA's sparse decode are built."""

SGLANG_LIVE = Declaration(
    key=Rounding(stored="e4m3"),
    query=Rounding(stored="e4m3"),
    pool="fp32_fast",
    score="fp8_wgmma",
    window=Rounding(stored="e4m3_pow2"),
    latent=Rounding(normed="bf16", stored="e4m3_pow2"),
    rope_tail=Rounding(stored="bf16"),
    attn_query=Rounding(normed="bf16", rotated="bf16"),
    attention="fp32",
    probability="bf16",
    output="bf16",
)
"""Rounding points of SGLang 0.5.23's CUDA kernels. Sources: `c4_v2.cuh` (pooling, built with fast math),
`fused_norm_rope_v2.cuh` (compressed latents: bf16 before their e4m3), `main_norm_rope.cuh` (window latents and the
attention query), DeepGEMM's `fp8_paged_mqa_logits`, FlashMLA's sparse decode (bf16 probabilities and output)."""


INDEX_DIM = 128
LATENT_DIM = NOPE_DIMS + ROPE_DIMS
"""Dims of index keys and of latents, for which SGLang's operators are written."""
LATENT_STAGES = ("kv", "attention")
ANY_DIMS = ("topk",)
"""Stages that read no dims."""


def check_dims(config: ModelConfig, stage: StageName) -> None:
    """CannotFeed where a stage of `config` has dims that SGLang's operators are not written for.

    They are templates: without this, each such layer would wait seconds for nvcc to reject it.
    """
    if stage in ANY_DIMS:
        return
    latent = stage in LATENT_STAGES
    name, dims, known = (
        ("head_dim", config.head_dim, LATENT_DIM) if latent else ("index_head_dim", config.index_head_dim, INDEX_DIM)
    )
    if dims != known:
        raise CannotFeed(f"{name} is {dims}, and SGLang's operators are written for {known}; choose another path")


def live_availability() -> Availability:
    """Whether SGLang's kernels can run here. Never raises: a package that fails to import counts as missing."""
    try:
        missing = [name for name in MODULES if find_spec(name) is None]
    except (ImportError, ValueError) as error:
        return Availability(False, f"looking for SGLang failed: {error}", INSTALL)
    if not torch.cuda.is_available():
        return Availability(False, "no CUDA device: SGLang's kernels run on a GPU", "use sglang-fp8@recorded here")
    if missing:
        return Availability(False, f"not installed: {', '.join(missing)}", INSTALL)
    major, minor = torch.cuda.get_device_capability()
    if major not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES.values())
        return Availability(False, f"sm_{major}{minor} has no fp8 MQA kernel: it is built for {known}")
    return Availability(True)


@lru_cache(maxsize=1)
def versions() -> str:
    """Versions of everything that shapes the numbers, and the GPU, as JSON."""
    found = {"gpu": torch.cuda.get_device_name()}
    for name in DISTRIBUTIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "absent"
    return json.dumps(found, sort_keys=True)


class RopeTables:
    """SGLang's own RoPE tables, made once a layer kind and grown as longer contexts come."""

    def __init__(self) -> None:
        self._tables: dict[tuple[LayerKind, str], Tensor] = {}

    def table(self, config: ModelConfig, kind: LayerKind, length: int, device: torch.device) -> Tensor:
        """complex64 [>= length, rope_dim / 2] on `device`: plain `rope_theta` for `swa` layers, else YaRN."""
        key = ("swa" if kind == "swa" else "csa", str(device))
        table = self._tables.get(key)  # type: ignore[arg-type]
        if table is None or len(table) < length:
            table = sglang_rope_table(config, kind, 1 << max(length - 1, 1).bit_length()).to(device)
            self._tables[key] = table  # type: ignore[index]
        return table


def sglang_rope_table(config: ModelConfig, kind: LayerKind, length: int) -> Tensor:
    """complex64 [length, rope_dim / 2] on the CPU, from SGLang's own `precompute_freqs_cis`."""
    from sglang.kernels.ops.attention.dsv4.rope import precompute_freqs_cis

    plain = kind == "swa"
    table: Tensor = precompute_freqs_cis(
        dim=config.qk_rope_head_dim,
        seqlen=length,
        original_seq_len=0 if plain else config.rope_original_max_position,
        base=config.rope_theta if plain else config.compress_rope_theta,
        factor=config.rope_factor,
        beta_fast=config.rope_beta_fast,
        beta_slow=config.rope_beta_slow,
    )
    return table
