"""Stages `kv` and `attention` of the transformers path: Hugging Face's attention module, run whole."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..reference.inputs import LayerInputs
from ..trace import StageTensors, Trace
from . import _transformers_modules as hf

HEAD_BLOCK = 8
"""Attention heads run at a time: the module copies every key once a head."""


class HfAttention(hf.HfModules):
    """Stage methods of a path whose attention is Hugging Face's."""

    @torch.no_grad()
    def kv(self, inputs: LayerInputs, trace: Trace) -> StageTensors:
        return {"window": self._window(inputs), "compressed": self._latents(inputs)}

    @torch.no_grad()
    def attention(self, inputs: LayerInputs, trace: Trace) -> StageTensors:
        heads = inputs.config.num_attention_heads
        out = torch.empty(inputs.attn_query.shape, device=inputs.attn_query.device)
        lse = torch.empty(out.shape[:2], device=out.device)
        for first in range(0, heads, HEAD_BLOCK):
            block = slice(first, first + HEAD_BLOCK)
            for rows, offset, seen in self.rows_of(inputs):
                compressed = trace["kv"]["compressed"][offset : offset + seen]
                call = self._attend_rows(inputs, trace, rows, block, compressed)
                out[rows, block], lse[rows, block] = call.output[0].float(), log_sum_exp(call).T
        return {"value": out, "lse": lse}

    def _call(self, inputs: LayerInputs, module: Any, positions: Tensor, cache: Any, mask: Tensor | None) -> Any:
        """Runs the whole attention module for rows at `positions`; what its attention function saw."""
        rotary = hf.modeling().DeepseekV4RotaryEmbedding(module.config).to(positions.device)
        hidden, position = self.hidden(positions), positions.unsqueeze(0)
        tables = {kind: rotary(hidden, position, layer_type=kind) for kind in ("main", "compress")}
        module(hidden, tables, position, mask, cache)
        return module.seen

    def _window(self, inputs: LayerInputs) -> Tensor:
        """Window latents fp32 [W, C]: the keys that the module hands to attention."""
        module, kv = self.module(inputs), inputs.window_kv.to(self.dtype).unsqueeze(0)
        module.config._attn_implementation = hf.KEYS_ONLY
        module.compressor = None
        module.kv_proj, module.q_b_proj = hf.Given(kv), hf.Given(torch.zeros_like(kv))
        hf.set_parameter(module.kv_norm, "weight", inputs.kv_norm_weight)
        key: Tensor = self._call(inputs, module, inputs.window_position, None, None).key
        return key[0, 0].float()

    def _latents(self, inputs: LayerInputs) -> Tensor:
        """Compressed latents fp32 [E, C], fed step by step through the module's own cache."""
        if inputs.main is None:
            return torch.empty((0, inputs.config.head_dim), device=inputs.row_position.device)
        module, one = self.module(inputs), inputs.row_position[:1]
        compressor = module.compressor
        self.load(compressor, inputs.main, inputs.ratio)
        compressor.indexer = hf.Given(torch.empty((1, 1, 0), dtype=torch.int64, device=one.device))
        latents = [torch.empty((0, inputs.config.head_dim), device=one.device)]
        for chunks in self.chunks(inputs, inputs.main):
            cache, entries = self.cache(module), None
            for rows in chunks:
                self.project(compressor, rows)
                hidden = self.hidden(one)
                entries = compressor(hidden, hidden, one.unsqueeze(0), cache, module.layer_idx)[0]
            latents += [] if entries is None else [entries[0, 0].float()]
        return torch.cat(latents)

    def _attend_rows(self, inputs: LayerInputs, trace: Trace, rows: Tensor, heads: slice, compressed: Tensor) -> Any:
        """Attention of some rows of one request and a block of heads, over the window tokens and entries given."""
        query = inputs.attn_query[rows, heads].to(self.dtype)
        module = self.module(inputs, query.shape[1])
        used, index = _compact(inputs.window_index[rows])
        window = trace["kv"]["window"][used].to(self.dtype)[None, None]
        cache = self.cache(module, window)
        if inputs.kind != "swa":
            entries = compressed.to(self.dtype).unsqueeze(0)
            cache.layers[module.layer_idx].compressed_kv["compressor"] = entries
            self.project(module.compressor, entries.new_empty((0, 2 * self._width(inputs))))
        if inputs.kind == "csa":
            module.compressor.indexer = hf.Given(trace.value("topk")[rows].long().unsqueeze(0))
        module.q_b_proj = hf.Given(query.flatten(1).unsqueeze(0))
        module.kv_proj = hf.Given(query.new_zeros((1, len(rows), inputs.config.head_dim)))
        hf.set_parameter(module, "sinks", inputs.attn_sink[heads])
        mask = window.new_full((1, 1, len(rows), len(used)), -torch.inf).scatter(-1, index[None, None], 0.0)
        return self._call(inputs, module, inputs.row_position[rows], cache, mask)

    def _width(self, inputs: LayerInputs) -> int:
        """Columns of the main compressor's kv (and of its gate)."""
        return inputs.config.head_dim * (2 if inputs.ratio == hf.OVERLAP_RATIO else 1)


def _compact(index: Tensor) -> tuple[Tensor, Tensor]:
    """Window tokens that some row uses [w], and where each row finds its own [r, window].

    A row whose window starts before token 0 repeats its newest token there, which it always has.
    """
    filled = torch.where(index < 0, index[:, -1:], index)
    used, place = torch.unique(filled, return_inverse=True)
    return used, place


def log_sum_exp(seen: SimpleNamespace) -> Tensor:
    """Natural log-sum-exp without the sink, fp32 [A, R], from the probabilities of one attention call.

    The module does not return it. With p = exp(s) / (sum exp + exp(sink)), it is s_i - log p_i + log(sum p) for any
    key i; the most probable one is taken.
    """
    probability: Tensor = seen.probability[0].float()
    best = probability.argmax(-1)
    key = seen.key[0, 0].float()[best]
    logit: Tensor = (seen.query[0].float() * key).sum(-1) * seen.scaling
    top = probability.gather(-1, best.unsqueeze(-1)).squeeze(-1)
    return logit - top.log() + probability.sum(-1).log()
