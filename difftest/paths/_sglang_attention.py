"""Attention of SGLang's DeepSeek-V4 models: FlashMLA cache, query, and sparse attention over window and entries."""

import math

import torch
from torch import Tensor

from ..reference.inputs import LayerInputs
from ..trace import StageTensors, Trace
from . import _sglang_math as math_
from . import flashmla_layout as flashmla
from ._sglang_compressor import CompressorModel
from .base import CannotFeed
from .planar_pages import PlanarPages

LATENT_BLOCK = 4096
"""Entries prepared and stored at a time; bounds the memory of intermediates."""
ATTENTION_BYTES = 1 << 26
"""Bytes of gathered keys that one block of rows may take."""


class AttentionModel(CompressorModel):
    """Building blocks of the stages `kv` and `attention`; subclasses are paths."""

    def rope_table(self, inputs: LayerInputs, positions: Tensor) -> Tensor:
        """fp32 [n, rope_dim / 2, 2] for positions int64 [n], with the frequencies of this layer's kind."""
        return math_.rope_table(inputs.config, inputs.kind, positions)

    def rotate(self, x: Tensor, table: Tensor) -> Tensor:
        return math_.rotate(x, table)

    def norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        return math_.rms_norm(x, weight, eps)

    def entry_position(self, inputs: LayerInputs) -> Tensor:
        """RoPE position of every entry, int64 [E]: the first token of its own block."""
        return inputs.entry_position

    def entry_slot(self, inputs: LayerInputs) -> Tensor:
        """Cache slot of every entry, int64 [E]."""
        return inputs.entry_slot

    def visible(self, inputs: LayerInputs) -> Tensor:
        """Entries each row may read, int64 [R]."""
        return inputs.visible

    # kv ---------------------------------------------------------------------------------------------------------------

    def latent(self, inputs: LayerInputs, x: Tensor, weight: Tensor, positions: Tensor) -> Tensor:
        """Norm and RoPE of latents, fp32 [n, C] -> fp32 [n, C], nothing rounded."""
        normed = self.norm(x, weight, inputs.config.rms_norm_eps)
        return self.rotate(normed, self.rope_table(inputs, positions))

    def window_source(self, nope: Tensor) -> Tensor:
        """What the window store quantises: the fp32 value itself."""
        return nope

    def compressed_source(self, nope: Tensor) -> Tensor:
        """What the compressed store quantises: the value rounded to bf16 first."""
        return math_.to_bf16(nope)

    def quantise_latent(self, nope: Tensor) -> tuple[Tensor, Tensor]:
        """fp32 [n, 448] -> e4m3 codes uint8 [n, 448] and ue8m0 exponents uint8 [n, 7], one for each 64."""
        blocks = nope.reshape(-1, flashmla.BLOCKS, flashmla.BLOCK)
        exponents = math_.ue8m0_scale(blocks, math_.E4M3_MAX)
        codes = math_.encode_e4m3(blocks / math_.decode_ue8m0(exponents).unsqueeze(-1))
        return codes.flatten(-2), exponents

    def store_latent(self, layout: PlanarPages, pool: Tensor, slots: Tensor, source: Tensor, rope: Tensor) -> None:
        """Quantises `source` fp32 [n, 448], rounds `rope` fp32 [n, 64] to bf16 and writes both at `slots` int64 [n]."""
        codes, exponents = self.quantise_latent(source)
        flashmla.pack(layout, pool, slots, codes, exponents, rope.to(torch.bfloat16))

    def load_latent(self, layout: PlanarPages, pool: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Latents as attention reads them, fp32 [n, C] of bf16 values, and their cache bytes uint8 [n, 584]."""
        out = torch.empty((len(slots), flashmla.NOPE_DIMS + flashmla.ROPE_DIMS), device=pool.device)
        raw = torch.empty((len(slots), flashmla.TOKEN_BYTES), dtype=torch.uint8, device=pool.device)
        for start in range(0, len(slots), LATENT_BLOCK):
            part = slice(start, start + LATENT_BLOCK)
            out[part] = flashmla.dequantise(*flashmla.unpack(layout, pool, slots[part]))
            raw[part] = torch.cat(layout.read(pool, slots[part]), -1)
        return out, raw

    def window_slot(self, inputs: LayerInputs) -> Tensor:
        """Window-cache slot of every window token, int64 [W]: pages in falling order, page 0 left unused."""
        token = torch.arange(len(inputs.window_kv), device=inputs.window_kv.device)
        pages = -(-len(token) // inputs.page_size)
        return (pages - token // inputs.page_size) * inputs.page_size + token % inputs.page_size

    def store_window(self, inputs: LayerInputs) -> tuple[Tensor, Tensor]:
        """Window latents through their cache: fp32 [W, C] and bytes uint8 [W, 584]."""
        layout, slots = flashmla.flashmla_pages(inputs.page_size), self.window_slot(inputs)
        pool = layout.poisoned(-(-len(slots) // inputs.page_size) + 1, slots.device)
        latent = self.latent(inputs, inputs.window_kv.float(), inputs.kv_norm_weight, inputs.window_position)
        nope, rope = latent[:, : flashmla.NOPE_DIMS], latent[:, flashmla.NOPE_DIMS :]
        self.store_latent(layout, pool, slots, self.window_source(nope), rope)
        return self.load_latent(layout, pool, slots)

    def store_compressed(self, inputs: LayerInputs) -> tuple[Tensor, Tensor]:
        """Compressed latents through the paged cache, as entries complete: fp32 [E, C] and bytes uint8 [E, 584]."""
        if inputs.main is None:
            none = torch.empty((0, inputs.config.head_dim), device=inputs.window_kv.device)
            return none, torch.empty((0, flashmla.TOKEN_BYTES), dtype=torch.uint8, device=none.device)
        pooled = self.pool_layer(inputs, inputs.main)
        layout, slots, position = (
            flashmla.flashmla_pages(inputs.page_size),
            self.entry_slot(inputs),
            self.entry_position(inputs),
        )
        pool = layout.poisoned(inputs.num_pages, slots.device)
        for part in completed_entries(inputs, LATENT_BLOCK):
            latent = self.latent(inputs, pooled[part], inputs.main.norm_weight, position[part])
            nope, rope = latent[:, : flashmla.NOPE_DIMS], latent[:, flashmla.NOPE_DIMS :]
            self.store_latent(layout, pool, slots[part], self.compressed_source(nope), rope)
        del pooled
        return self.load_latent(layout, pool, slots)

    def kv(self, inputs: LayerInputs, trace: Trace) -> StageTensors:
        """Window and compressed latents. CannotFeed unless a latent has the 512 dims that the cache layout holds."""
        width = flashmla.NOPE_DIMS + flashmla.ROPE_DIMS
        if inputs.config.head_dim != width:
            raise CannotFeed(f"head_dim is {inputs.config.head_dim}, and this cache holds latents of {width} dims")
        window, window_raw = self.store_window(inputs)
        compressed, compressed_raw = self.store_compressed(inputs)
        return {
            "window": window,
            "compressed": compressed,
            "window_raw": window_raw,
            "compressed_raw": compressed_raw,
        }

    # attention --------------------------------------------------------------------------------------------------------

    def attention_query(self, inputs: LayerInputs) -> Tensor:
        """Per-head norm in fp32 -> bf16, then RoPE in fp32 -> bf16: fp32 [R, A, C] of bf16 values."""
        normed = math_.to_bf16(self.norm(inputs.attn_query.float(), None, inputs.config.rms_norm_eps))
        table = self.rope_table(inputs, inputs.row_position).unsqueeze(1)
        return math_.to_bf16(self.rotate(normed, table))

    def attended_entries(self, inputs: LayerInputs, trace: Trace) -> Tensor:
        """Entries each row attends to, request-relative, -1 padded: selected (`csa`), all visible (`hca`) or none."""
        if inputs.kind == "csa":
            return trace.value("topk").long()
        visible = self.visible(inputs)
        entry = torch.arange(int(visible.max()) if len(visible) else 0, device=visible.device)
        return torch.where(entry < visible.unsqueeze(1), entry, -1)

    def gather(self, latents: Tensor, index: Tensor) -> Tensor:
        """Latents [n, C] at `index` int64 [R, k], zeros where negative, whatever lies at slot 0: fp32 [R, k, C]."""
        if not len(latents):
            return latents.new_zeros((*index.shape, latents.shape[1]))
        return latents[index.clamp_min(0)].masked_fill_((index < 0).unsqueeze(-1), 0.0)

    def attend(self, query: Tensor, keys: Tensor, valid: Tensor, sink: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Attention of one block of rows, keys being the values too.

        query [r, A, C], keys [r, k, C] fp32 of bf16 values, valid bool [r, k], sink fp32 [A] -> out fp32 [r, A, C] of
        bf16 values, lse fp32 [r, A] (natural log, without the sink). The row sum takes P before it is rounded to bf16,
        the sink joins it at the end; a row without a valid key is 0 with lse -inf.
        """
        logit = (query @ keys.transpose(1, 2)).masked_fill(~valid.unsqueeze(1), -math.inf)
        top = logit.amax(-1, keepdim=True)
        base = top.masked_fill(top == -math.inf, 0.0)
        probability = torch.exp2((logit - base) * (scale * math.log2(math.e)))
        total = probability.sum(-1, keepdim=True)
        denominator = total + (sink.unsqueeze(-1) - base * scale).exp()
        out = math_.to_bf16(probability) @ keys / denominator
        empty = ~valid.any(-1)[:, None, None]
        lse = (total.log() + base * scale).masked_fill(empty, -math.inf)
        return math_.to_bf16(out.masked_fill(empty, 0.0)), lse.squeeze(-1)

    def attention(self, inputs: LayerInputs, trace: Trace) -> StageTensors:
        window, compressed = trace["kv"]["window"], trace["kv"]["compressed"]
        query, entries = self.attention_query(inputs), self.attended_entries(inputs, trace)
        offset = torch.tensor(inputs.entry_offset, device=entries.device)[inputs.row_request].unsqueeze(1)
        packed = torch.where(entries < 0, -1, entries + offset)
        out, lse = torch.empty_like(query), torch.empty(query.shape[:2], device=query.device)
        keys_per_row = inputs.window_index.shape[1] + packed.shape[1]
        rows = max(1, ATTENTION_BYTES // (keys_per_row * query.shape[-1] * query.element_size()))
        for start in range(0, len(query), rows):
            block = slice(start, start + rows)
            keys = torch.cat(
                (self.gather(window, inputs.window_index[block]), self.gather(compressed, packed[block])), 1
            )
            valid = torch.cat((inputs.window_index[block] >= 0, packed[block] >= 0), 1)
            out[block], lse[block] = self.attend(
                query[block], keys, valid, inputs.attn_sink, inputs.config.softmax_scale
            )
        return {"value": out, "lse": lse}


def completed_entries(inputs: LayerInputs, block: int) -> list[slice]:
    """Slices of the packed entry axis, at most `block` long, in the order in which the steps complete entries."""
    done = [0] * len(inputs.lengths)
    ranges = [(request, count) for request, count in enumerate(inputs.prefix_entries)]
    ranges += [(span.request, span.stop // inputs.ratio) for step in inputs.steps for span in step]
    slices = []
    for request, stop in ranges:
        first, last = (inputs.entry_offset[request] + entry for entry in (done[request], stop))
        slices += [slice(start, min(start + block, last)) for start in range(first, last, block)]
        done[request] = max(done[request], stop)
    return slices
