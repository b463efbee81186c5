"""Model constants, read from a DeepSeek `config.json` and never written down anywhere else."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

LayerKind = Literal["swa", "csa", "hca"]

KIND_OF_RATIO: dict[int, LayerKind] = {0: "swa", 4: "csa", 128: "hca"}
SHIPPED = {"v4-flash": "deepseek_v4_flash.json", "v4-pro": "deepseek_v4_pro.json"}


@dataclass(frozen=True)
class ModelConfig:
    """The constants of a DeepSeek-V4 model that its sparse attention depends on.

    Field names are those of `config.json`, so a reader can look each of them up there.
    """

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    sliding_window: int
    rope_theta: float
    compress_rope_theta: float
    rope_factor: float
    rope_original_max_position: int
    rope_beta_fast: float
    rope_beta_slow: float
    max_position_embeddings: int
    rms_norm_eps: float
    compress_ratios: tuple[int, ...]

    @property
    def index_scale(self) -> float:
        """Factor of every head weight: index_head_dim^-0.5 * index_n_heads^-0.5 (facts of `model.py`, Indexer)."""
        return float(self.index_head_dim**-0.5 * self.index_n_heads**-0.5)

    @property
    def softmax_scale(self) -> float:
        return float(self.head_dim**-0.5)

    def kind(self, layer: int) -> LayerKind:
        """Kind of `layer`: `swa` (ratio 0), `csa` (ratio 4, has the indexer) or `hca` (ratio 128)."""
        if not 0 <= layer < len(self.compress_ratios):
            raise ValueError(
                f"layer {layer} does not exist: this model lists {len(self.compress_ratios)} compress_ratios; "
                f"choose 0 to {len(self.compress_ratios) - 1}"
            )
        ratio = self.compress_ratios[layer]
        if ratio not in KIND_OF_RATIO:
            raise ValueError(f"layer {layer} has compress ratio {ratio}, and only 0, 4 and 128 are DeepSeek-V4's")
        return KIND_OF_RATIO[ratio]

    def layers(self, kind: LayerKind) -> list[int]:
        return [layer for layer in range(len(self.compress_ratios)) if self.kind(layer) == kind]


def config_from_dict(raw: dict[str, Any]) -> ModelConfig:
    """A `ModelConfig` from the parsed `config.json` of a DeepSeek-V4 checkpoint; KeyError names a missing key."""
    scaling = raw["rope_scaling"]
    plain = {
        name: raw[name]
        for name in ModelConfig.__dataclass_fields__
        if not name.startswith("rope_") and name != "compress_ratios"
    }
    return ModelConfig(
        **plain,
        rope_theta=float(raw["rope_theta"]),
        rope_factor=float(scaling["factor"]),
        rope_original_max_position=int(scaling["original_max_position_embeddings"]),
        rope_beta_fast=float(scaling["beta_fast"]),
        rope_beta_slow=float(scaling["beta_slow"]),
        compress_ratios=tuple(raw["compress_ratios"]),
    )


def load_config(name_or_path: str | Path) -> ModelConfig:
    """Loads a shipped config by name (`v4-flash`, `v4-pro`) or any `config.json` by path."""
    shipped = SHIPPED.get(str(name_or_path))
    path = Path(__file__).parent / "configs" / shipped if shipped else Path(name_or_path)
    if not path.is_file():
        raise FileNotFoundError(
            f"no model config {name_or_path!s}: give one of {sorted(SHIPPED)} or a config.json path"
        )
    return config_from_dict(json.loads(path.read_text()))
