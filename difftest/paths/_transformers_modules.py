"""Hugging Face's DeepSeek-V4 modules, taken apart so that each can be fed what comes after its linear layers.

The modules run unchanged: a linear layer is replaced, as a submodule, by one that returns a given tensor (`Given`),
inner values are read by forward hooks, and the attention call by attention functions registered with the library.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ..reference.config import ModelConfig
from ..reference.inputs import CompressorInputs, LayerInputs
from .base import CannotFeed

LAYER_OF_KIND = {"swa": 0, "csa": 1, "hca": 2}
"""Layer of each kind in the three-layer Hugging Face config built here."""
LAYER_TYPES = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
CAPTURE = "difftest_capture"
KEYS_ONLY = "difftest_keys_only"
OVERLAP_RATIO = 4


class Given(nn.Module):
    """Stands in for a submodule and returns a given value whatever it is called with."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = value

    def forward(self, *args: object, **options: object) -> Tensor:
        return self.value


class GivenCache:
    """A cache whose sliding-window part is given; `layers` holds Hugging Face's own compressor cache by layer."""

    def __init__(self, layers: dict[int, Any], window: Tensor | None = None) -> None:
        self.layers = layers
        self.window = window

    def update(self, key: Tensor, value: Tensor, layer: int, **options: object) -> tuple[Tensor | None, Tensor | None]:
        return self.window, self.window


@contextmanager
def captured(module: nn.Module) -> Iterator[list[Tensor]]:
    """First argument of every call of `module` while the block runs."""
    calls: list[Tensor] = []
    handle = module.register_forward_pre_hook(lambda _, args: calls.append(args[0]))
    try:
        yield calls
    finally:
        handle.remove()


def modeling() -> Any:
    """Hugging Face's `modeling_deepseek_v4`, imported on first use."""
    from transformers.models.deepseek_v4 import modeling_deepseek_v4

    return modeling_deepseek_v4


def hf_config(config: ModelConfig, heads: int) -> Any:
    """Hugging Face's config with the constants of `config`, one layer a kind, and linear layers of width 1.

    heads: attention heads; each is computed by itself, so a part of them can be run at a time.
    """
    from transformers import AttentionInterface
    from transformers.models.deepseek_v4 import DeepseekV4Config

    AttentionInterface.register(CAPTURE, _capture)
    AttentionInterface.register(KEYS_ONLY, _keys_only)
    built = DeepseekV4Config(
        hidden_size=1,
        q_lora_rank=1,
        o_groups=1,
        o_lora_rank=1,
        num_hidden_layers=len(LAYER_TYPES),
        layer_types=list(LAYER_TYPES),
        num_attention_heads=heads,
        head_dim=config.head_dim,
        partial_rotary_factor=config.qk_rope_head_dim / config.head_dim,
        index_n_heads=config.index_n_heads,
        index_head_dim=config.index_head_dim,
        index_topk=config.index_topk,
        sliding_window=config.sliding_window,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        rope_theta=config.rope_theta,
        compress_rope_theta=config.compress_rope_theta,
        rope_parameters={
            "rope_type": "yarn",
            "factor": config.rope_factor,
            "original_max_position_embeddings": config.rope_original_max_position,
            "beta_fast": config.rope_beta_fast,
            "beta_slow": config.rope_beta_slow,
        },
    )
    built._attn_implementation = CAPTURE
    return built


def _capture(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, **options: object
) -> tuple[Tensor, Tensor]:
    """Hugging Face's eager attention; its operands and results stay on the module as `seen`."""
    output, probability = modeling().eager_attention_forward(module, query, key, value, mask, scaling)
    module.seen = SimpleNamespace(query=query, key=key, scaling=scaling, output=output, probability=probability)
    return output, probability


def _keys_only(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: object
) -> tuple[Tensor, None]:
    """No attention at all: keeps the keys as `seen.key` and returns zeros."""
    module.seen = SimpleNamespace(key=key)
    return torch.zeros_like(query).transpose(1, 2), None


def set_parameter(module: nn.Module, name: str, value: Tensor) -> None:
    """Replaces a parameter by `value`, in `value`'s dtype."""
    setattr(module, name, nn.Parameter(value, requires_grad=False))


class HfModules:
    """What every stage of the path needs: modules of the layer's kind, and tensors fed in place of linear outputs."""

    dtype: torch.dtype

    def module(self, inputs: LayerInputs, heads: int = 1) -> Any:
        """A fresh attention module of this layer's kind (its compressor and indexer inside)."""
        module = modeling().DeepseekV4Attention(hf_config(inputs.config, heads), LAYER_OF_KIND[inputs.kind])
        for linear in (module.q_a_proj, module.o_a_proj, module.o_b_proj):
            linear.to(self.dtype)
        return module.requires_grad_(False).to(inputs.row_position.device)

    def cache(self, module: Any, window: Tensor | None = None) -> GivenCache:
        """A cache with Hugging Face's compressor state for the module's layer, empty."""
        classes = {"csa": modeling().DeepseekV4CSACache, "hca": modeling().DeepseekV4HCACache}
        kind = next(kind for kind, layer in LAYER_OF_KIND.items() if layer == module.layer_idx)
        return GivenCache({module.layer_idx: classes[kind](module.config)} if kind in classes else {}, window)

    def hidden(self, positions: Tensor) -> Tensor:
        """Hidden states [1, n, 1] that no linear layer reads: only their length and dtype matter."""
        return torch.zeros((1, len(positions), 1), dtype=self.dtype, device=positions.device)

    def project(self, module: Any, rows: Tensor) -> None:
        """Makes rows fp32 [n, width] the output of the module's `kv_proj` and `gate_proj`, in this path's dtype."""
        kv, gate = rows.to(self.dtype).unsqueeze(0).chunk(2, -1)
        module.kv_proj, module.gate_proj = Given(kv), Given(gate)

    def load(self, module: Any, part: CompressorInputs, ratio: int) -> None:
        """Gives a compressor its bias and norm weight. Ratio 4: bias [4, 2 D], the overlap half first."""
        bias = torch.cat((part.ape[:ratio], part.ape[ratio:]), -1) if ratio == OVERLAP_RATIO else part.ape
        set_parameter(module, "position_bias", bias)
        set_parameter(module.kv_norm, "weight", part.norm_weight)

    def chunks(self, inputs: LayerInputs, part: CompressorInputs) -> Iterator[list[Tensor]]:
        """For each request, its rows of `kv_score` cut as the steps cut them; CannotFeed with a pooled prefix."""
        if any(inputs.prefix_entries):
            raise CannotFeed("transformers pools every entry from its tokens: choose a case without pooled_prefix")
        for request, token in enumerate(inputs.token_offset[:-1]):
            spans = [span for step in inputs.steps for span in step if span.request == request]
            yield [part.kv_score[token + span.start : token + span.stop] for span in spans]

    def rows_of(self, inputs: LayerInputs) -> Iterator[tuple[Tensor, int, int]]:
        """Rows of each request [r], its first packed entry, and how many entries its rows see at most."""
        visible = inputs.visible
        for request, offset in enumerate(inputs.entry_offset[:-1]):
            rows = (inputs.row_request == request).nonzero().squeeze(1)
            if len(rows):
                yield rows, offset, int(visible[rows].max())
