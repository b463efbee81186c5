"""What the bf16 index-K cannot run with: each is one sentence, and none is worked around."""

import os
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from .flags import BF16_INDEX_K

TESTED_SGLANG = ("0.5.23",)
TESTED_CAPABILITIES = ((9, 0),)
"""Compute capabilities on which the hooks were run inside SGLang; others from SMALLEST_CAPABILITY on get a warning."""
SMALLEST_CAPABILITY = (8, 0)

OTHER_SCORERS = ("SGLANG_OPT_USE_TILELANG_INDEXER", "SGLANG_OPT_USE_AITER_INDEXER", "SGLANG_FP8_PAGED_MQA_LOGITS_TORCH")
"""Variables by which SGLang scores with functions that read fp8 pages, and that the plugin does not replace."""

ARCHITECTURE = "DeepseekV4ForCausalLM"
INDEXER_RATIO = 4
"""Tokens an index entry stands for."""
FP4_INDEXER = "enable_deepseek_v4_fp4_indexer"
STORAGE_BACKEND = "hicache_storage_backend"


class Unsupported(RuntimeError):
    """A reason not to serve; the message is one sentence."""


def sglang_version() -> str | None:
    """The installed SGLang's version, None where there is none."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return None


def check_version() -> None:
    """Raises Unsupported unless the installed SGLang is one of TESTED_SGLANG."""
    found = sglang_version()
    if found not in TESTED_SGLANG:
        have = "SGLang is not installed" if found is None else f"SGLang is {found}"
        raise Unsupported(
            f"{have}, and this plugin was tested with {', '.join(TESTED_SGLANG)} only: install that, or leave it off"
        )


def check_device() -> None:
    """Raises Unsupported unless this process has an NVIDIA GPU that the kernels are built for."""
    for name, found in (
        ("HIP (AMD)", torch.version.hip is not None),
        ("NPU", hasattr(torch, "npu") and bool(torch.npu.is_available())),
        ("XPU", hasattr(torch, "xpu") and torch.xpu.is_available() and not torch.cuda.is_available()),
    ):
        if found:
            raise Unsupported(
                f"{BF16_INDEX_K}=1 runs on NVIDIA GPUs only and this torch drives {name}: unset it, or use one"
            )
    if not torch.cuda.is_available():
        raise Unsupported(f"{BF16_INDEX_K}=1 needs an NVIDIA GPU and torch sees none here: unset it, or give one")
    capability = torch.cuda.get_device_capability()
    if capability < SMALLEST_CAPABILITY:
        have, low = (f"sm_{major}{minor}" for major, minor in (capability, SMALLEST_CAPABILITY))
        raise Unsupported(f"{BF16_INDEX_K}=1 needs bf16 tensor cores ({low} or newer) and this GPU is {have}")


def check_scorers(environ: Any = os.environ) -> None:
    """Raises Unsupported where a variable sends the scores to a function that reads fp8 pages."""
    for name in OTHER_SCORERS:
        if environ.get(name, "").lower() in ("1", "true", "yes", "y"):
            raise Unsupported(
                f"{name} is set and scores fp8 pages, which {BF16_INDEX_K}=1 does not store: set {name}=0, or unset "
                f"{BF16_INDEX_K}"
            )


def check_options(arguments: Any) -> None:
    """Raises Unsupported where SGLang's server arguments ask for what bf16 index keys cannot do."""
    if getattr(arguments, FP4_INDEXER, False):
        raise Unsupported(
            f"--enable-deepseek-v4-fp4-indexer stores fp4 index keys and {BF16_INDEX_K}=1 stores bf16: choose one"
        )
    if getattr(arguments, "device", None) not in (None, "cuda"):
        raise Unsupported(f"--device {arguments.device} and {BF16_INDEX_K}=1 do not fit: it runs on NVIDIA GPUs only")
    storage = getattr(arguments, STORAGE_BACKEND, None)
    if storage is not None:
        raise Unsupported(
            f"--hicache-storage-backend {storage} names stored pages by model alone, so fp8 pages would be read as "
            f"bf16 ones: leave it out with {BF16_INDEX_K}=1 (a host cache in memory is fine)"
        )


def check_model(config: Any) -> None:
    """Raises Unsupported unless `config`, a Hugging Face config, is of a model with DeepSeek-V4's indexer layers."""
    names = list(getattr(config, "architectures", None) or ())
    if ARCHITECTURE not in names:
        have = ", ".join(names) or "a model that names no architecture"
        raise Unsupported(f"{BF16_INDEX_K}=1 is for {ARCHITECTURE} and this is {have}: unset it")
    if INDEXER_RATIO not in (getattr(config, "compress_ratios", None) or ()):
        raise Unsupported(
            f"this model has no layer of compression ratio {INDEXER_RATIO}, whose index keys {BF16_INDEX_K}=1 stores: "
            "unset it"
        )


def warnings() -> Iterator[str]:
    """Sentences for the log: what may run but was never run."""
    capability = torch.cuda.get_device_capability()
    if capability not in TESTED_CAPABILITIES:
        yield f"sm_{capability[0]}{capability[1]} was not tested with bf16 index keys; sm_90 was"
