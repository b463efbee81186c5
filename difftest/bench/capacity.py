"""What a key format costs in context: bytes a token, and the tokens that fit."""

from dataclasses import asdict, dataclass
from typing import Any

from ..kernels.layout import ENTRY_BYTES
from ..reference.config import ModelConfig

FP8_ENTRY_BYTES = 132
"""128 e4m3 codes and one fp32 scale."""
LATENT_BYTES = 584
"""A latent as FlashMLA stores it: 448 e4m3, 64 bf16, 8 scale bytes."""
WINDOW_SHARE = 0.1
"""SGLang's default `swa_full_tokens_ratio` for DeepSeek-V4: window slots for each token of context."""
STATE_BYTES_PER_WINDOW_SLOT = 8 / 256 * 4 * (512 + 128) * 4
"""Compressor state of a ratio-4 layer: 8 rows for 256 window slots, 4 fp32 vectors each of both latents' widths."""


@dataclass(frozen=True)
class Capacity:
    """The price of bf16 index keys.

    index_bytes   index-key bytes a token over all CSA layers, by format.
    total_bytes   bytes a token of everything that grows with context, by format.
    memory        bytes given to the caches: `fraction` of the card.
    tokens        tokens that fit, by format.    lost  tokens, and their share, that fp8 holds and bf16 does not.
    """

    layers: int
    index_bytes: dict[str, float]
    total_bytes: dict[str, float]
    fraction: float
    memory: int
    tokens: dict[str, int]
    lost: int
    lost_share: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def sentence(self) -> str:
        """The answer for people."""
        return (
            f"Capacity: index keys over {self.layers} CSA layers take {self.index_bytes['fp8']:.0f} B a token in fp8 "
            f"and {self.index_bytes['bf16']:.0f} B in bf16; with everything else that grows with context "
            f"{self.total_bytes['fp8']:.0f} B and {self.total_bytes['bf16']:.0f} B. At {self.fraction:.0%} of the card "
            f"({self.memory / 1e9:.1f} GB) {self.tokens['fp8']:,} tokens fit with fp8 and {self.tokens['bf16']:,} with "
            f"bf16: {self.lost:,} fewer ({self.lost_share:.1%})."
        )


def capacity(config: ModelConfig, card_bytes: int, fraction: float) -> Capacity:
    """Capacity of `fraction` of a card by SGLang's sizing rule (`pool_configurator.py`, bytes per full token)."""
    csa, hca = len(config.layers("csa")), len(config.layers("hca"))
    window = WINDOW_SHARE * (config.num_hidden_layers * LATENT_BYTES + csa * STATE_BYTES_PER_WINDOW_SLOT)
    latents = LATENT_BYTES * (csa / 4 + hca / 128)
    index = {name: csa * size / 4 for name, size in (("fp8", FP8_ENTRY_BYTES), ("bf16", ENTRY_BYTES))}
    total = {name: window + latents + size for name, size in index.items()}
    memory = int(card_bytes * fraction)
    tokens = {name: int(memory / size) for name, size in total.items()}
    lost = tokens["fp8"] - tokens["bf16"]
    return Capacity(csa, index, total, fraction, memory, tokens, lost, lost / max(1, tokens["fp8"]))
