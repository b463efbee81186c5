"""The stages of a sparse-attention layer: their order, their canonical tensors and what each reads.

Every path produces these, every record names one, and isolated checks walk them in this order.
R rows, E entries (packed over requests), H index heads, D index head dim, A attention heads, C head_dim.
"""

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

StageName = Literal["compressed", "index_k", "index_q", "head_weight", "score", "topk", "kv", "attention"]


@dataclass(frozen=True)
class Stage:
    """One stage: `tensors` it must provide, `extras` it may provide, `reads` its upstream stages."""

    name: StageName
    tensors: dict[str, str]
    reads: tuple[StageName, ...]
    says: str
    extras: dict[str, str]


STAGES: dict[StageName, Stage] = {
    stage.name: stage
    for stage in (
        Stage("compressed", {"value": "[E, D] fp32"}, (), "pooled key before the norm", {}),
        Stage(
            "index_k",
            {"value": "[E, D] fp32"},
            ("compressed",),
            "key as the scorer reads it back from the paged cache",
            {"codes": "[E, D] uint8", "scale": "[E, blocks] fp32", "raw": "[pages, bytes] uint8"},
        ),
        Stage(
            "index_q",
            {"value": "[R, H, D] fp32"},
            (),
            "query as the scorer reads it",
            {"codes": "[R, H, D] uint8", "scale": "[R, H, blocks] fp32"},
        ),
        Stage(
            "head_weight",
            {"value": "[R, H] fp32"},
            (),
            "weight with D^-0.5 H^-0.5, without the query scale",
            {"folded": "[R, H] fp32, the weight times the query scale as the scorer reads it"},
        ),
        Stage(
            "score",
            {"value": "[R, max visible] fp32"},
            ("index_k", "index_q", "head_weight"),
            "index score, -inf past visible",
            {},
        ),
        Stage(
            "topk",
            {"value": "[R, k] int32"},
            ("score",),
            "selected entries, request-relative, -1 padded",
            {"slots": "[R, k] int32, the pool slots of the same entries"},
        ),
        Stage(
            "kv",
            {"window": "[W, C] fp32", "compressed": "[E, C] fp32"},
            (),
            "window and compressed latent as attention reads them",
            {"window_raw": "[W, 584] uint8 cache bytes", "compressed_raw": "[E, 584] uint8 cache bytes"},
        ),
        Stage(
            "attention",
            {"value": "[R, A, C] fp32", "lse": "[R, A] fp32"},
            ("topk", "kv"),
            "output before the inverse RoPE; natural log-sum-exp without the sink",
            {},
        ),
    )
}


def stages_of(kind: str) -> list[StageName]:
    """Stages a layer of `kind` has: all for `csa`; `kv` and `attention` for `swa` and `hca`."""
    return list(STAGES) if kind == "csa" else ["kv", "attention"]


def nearest(word: str, known: list[str], what: str) -> str:
    """One sentence for an unknown name: the value, and the nearest known ones."""
    close = get_close_matches(word, known, n=3, cutoff=0.4) or sorted(known)[:8]
    return f"unknown {what} {word!r}: did you mean {', '.join(close)}? `difftest list {what}s` shows all"


def check_stage(name: str) -> StageName:
    """`name` as a stage name; ValueError with the nearest names otherwise."""
    if name not in STAGES:
        raise ValueError(nearest(name, list(STAGES), "stage"))
    return name
