"""Model in torch of SGLang's CUDA fp8 index path: every rounding point of its kernels, on any machine.

Sources: SGLang 0.5.23 (`c4_v2.cuh`, `fused_norm_rope_v2.cuh`, `main_norm_rope.cuh`, `topk_v2.cuh`, `kv_layout.cuh`) and
DeepGEMM's `fp8_paged_mqa_logits`. Each operation is a method of its own, so that a fault can be planted in one alone.
"""

import math
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from ..reference.inputs import LayerInputs
from ..trace import StageTensors, Trace
from . import _hopper_scores as hopper
from . import _sglang_math as math_
from ._sglang_attention import AttentionModel, completed_entries
from .base import Declaration, Path, Rounding
from .planar_pages import PlanarPages

SGLANG_FP8 = Declaration(
    key=Rounding(stored="e4m3"),
    query=Rounding(stored="e4m3"),
    pool="fp32",
    score="fp32",
    window=Rounding(stored="e4m3_pow2"),
    latent=Rounding(normed="bf16", stored="e4m3_pow2"),
    rope_tail=Rounding(stored="bf16"),
    attn_query=Rounding(normed="bf16", rotated="bf16"),
    attention="fp32",
    probability="bf16",
    output="bf16",
)
"""Rounding points of SGLang's fp8 path, with fp32 sums. (Its kernels pool with `fp32_fast`, score with `fp8_wgmma`.)"""

SCALE_BYTES = 4
KEY_BLOCK = 8192
"""Entries prepared at a time; bounds the memory of intermediates."""
SCORE_BYTES = 1 << 25
"""Bytes of per-head products held at a time."""


class SglangFp8Model(AttentionModel, Path):
    """SGLang's fp8 index path. Nothing of a key or query is rounded before its single e4m3 rounding.

    accumulator   of the scores: `fp32` (default), or `wgmma` for the tensor core of an H100 or H200 bit for bit.
    """

    name = "sglang-fp8-model"
    says: ClassVar[str] = "torch model of SGLang's CUDA fp8 kernels, at every rounding point"
    declares = SGLANG_FP8

    def __init__(self, accumulator: str = "fp32") -> None:
        if accumulator not in ("fp32", "wgmma"):
            raise ValueError(f"accumulator is {accumulator!r}: choose fp32 or wgmma")
        self.accumulator = accumulator
        if accumulator == "wgmma":
            self.declares = replace(type(self).declares, score="fp8_wgmma")

    def hadamard(self, x: Tensor) -> Tensor:
        return math_.hadamard(x)

    # compressed and index_k -------------------------------------------------------------------------------------------

    def compressed(self, inputs: LayerInputs, trace: Trace) -> StageTensors:
        assert inputs.index is not None
        return {"value": self.pool_layer(inputs, inputs.index)}

    def prepare_key(self, inputs: LayerInputs, pooled: Tensor, weight: Tensor, positions: Tensor) -> Tensor:
        """Norm, RoPE, Hadamard: fp32 [n, D] -> fp32 [n, D]."""
        normed = self.norm(pooled, weight, inputs.config.rms_norm_eps)
        return self.hadamard(self.rotate(normed, self.rope_table(inputs, positions)))

    def quantise_key(self, key: Tensor) -> tuple[Tensor, Tensor]:
        """fp32 [n, D] -> e4m3 codes uint8 [n, D] and one fp32 scale [n, 1]; value * (1 / scale), not value / scale."""
        scale = math_.raw_scale(key)
        return math_.encode_e4m3(key * scale.reciprocal()), scale

    def page_layout(self, inputs: LayerInputs) -> PlanarPages:
        """64 entries of 128 codes, then 64 fp32 scales: 8,448 bytes."""
        return PlanarPages(inputs.page_size, inputs.config.index_head_dim, SCALE_BYTES)

    def pack_page(self, layout: PlanarPages, pool: Tensor, slots: Tensor, codes: Tensor, scale: Tensor) -> None:
        """Writes codes uint8 [n, D] and scales fp32 [n, 1] at `slots` int64 [n]."""
        layout.write(pool, slots, codes, scale.contiguous().view(torch.uint8))

    def unpack_page(self, layout: PlanarPages, pool: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Codes uint8 [n, D] and scales fp32 [n, 1] at `slots` int64 [n]."""
        codes, scale = layout.read(pool, slots)
        return codes, scale.contiguous().view(torch.float32)

    def dequantise(self, codes: Tensor, scale: Tensor) -> Tensor:
        """Codes uint8 [..., D] times fp32 scale [..., 1]: fp32 [..., D]."""
        return math_.decode_e4m3(codes) * scale

    def index_k(self, inputs: LayerInputs, trace: Trace) -> StageTensors:
        assert inputs.index is not None
        pooled, slots, position = trace.value("compressed"), self.entry_slot(inputs), self.entry_position(inputs)
        layout = self.page_layout(inputs)
        pool = layout.poisoned(inputs.num_pages, pooled.device)
        for part in completed_entries(inputs, KEY_BLOCK):
            key = self.prepare_key(inputs, pooled[part], inputs.index.norm_weight, position[part])
            self.pack_page(layout, pool, slots[part], *self.quantise_key(key))
        codes, scale = self.unpack_page(layout, pool, slots)
        return {"value": self.dequantise(codes, scale), "codes": codes, "scale": scale, "raw": pool}

    # index_q and head_weight ------------------------------------------------------------------------------------------

    def prepare_query(self, inputs: LayerInputs, query: Tensor) -> Tensor:
        """RoPE and Hadamard: fp32 [R, H, D] -> fp32 [R, H, D]."""
        table = self.rope_table(inputs, inputs.row_position).unsqueeze(1)
        return self.hadamard(self.rotate(query, table))

    def quantise_query(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """fp32 [R, H, D] -> e4m3 codes uint8 [R, H, D] and fp32 scale [R, H, 1]."""
        scale = math_.raw_scale(query)
        return math_.encode_e4m3(query * scale.reciprocal()), scale

    def index_q(self, inputs: LayerInputs, trace: Trace) -> StageTensors:
        assert inputs.index_query is not None
        codes, scale = self.quantise_query(self.prepare_query(inputs, inputs.index_query.float()))
        return {"value": self.dequantise(codes, scale), "codes": codes, "scale": scale}

    def scale_weight(self, weight: Tensor, factor: float) -> Tensor:
        """bf16 [R, H] -> fp32 [R, H], times the constant rounded to fp32."""
        return weight.float() * torch.tensor(factor, dtype=torch.float32, device=weight.device)

    def head_weight(self, inputs: LayerInputs, trace: Trace) -> StageTensors:
        assert inputs.index_weight is not None
        return {"value": self.scale_weight(inputs.index_weight, inputs.config.index_scale)}

    # score ------------------------------------------------------------------------------------------------------------

    def score_query(self, trace: Trace) -> tuple[Tensor, Tensor]:
        """What the scorer multiplies, fp32 [R, H, D], and the scale its head weight takes, [R, H].

        A query that another path stored in another format is taken at its value, with scale 1.
        """
        stored = trace["index_q"]
        if not _has_fp8_rows(stored):
            return stored["value"], torch.ones_like(stored["value"][..., 0])
        return math_.decode_e4m3(stored["codes"]), stored["scale"][..., 0]

    def score_key(self, trace: Trace, entries: slice) -> tuple[Tensor, Tensor]:
        """Keys the scorer multiplies, fp32 [n, D], and the scale it applies to their sum over heads, [n]."""
        stored = trace["index_k"]
        if not _has_fp8_rows(stored):
            return stored["value"][entries], torch.ones_like(stored["value"][entries, 0])
        return math_.decode_e4m3(stored["codes"][entries]), stored["scale"][entries, 0]

    def fold_weight(self, weight: Tensor, scale: Tensor) -> Tensor:
        """Head weight fp32 [R, H] with the query's scale [R, H] in it; valid because a scale is positive."""
        return weight * scale

    def dot(self, query: Tensor, key: Tensor) -> Tensor:
        """Products of every head: query [r, H, D], key [n, D] -> [r, H, n], fp32 sums of exact products."""
        if self.accumulator == "wgmma":
            return hopper.fp8_dot(query.flatten(0, 1), key).view(*query.shape[:2], -1)
        return query @ key.T

    def activate(self, product: Tensor) -> Tensor:
        """ReLU, before the weight."""
        return product.relu_()

    def sum_heads(self, product: Tensor, weight: Tensor) -> Tensor:
        """Weighted sum over heads: [r, H, n] and [r, H] -> [r, n], fp32."""
        return torch.bmm(weight.unsqueeze(1), product).squeeze(1)

    def scale_score(self, total: Tensor, scale: Tensor) -> Tensor:
        """Times the key's scale: [r, n] and [n] -> [r, n]."""
        return total * scale

    def combine(self, product: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        """Scores from the products after ReLU: [r, H, n], [r, H] and [n] -> [r, n]."""
        if self.accumulator == "wgmma":
            return hopper.reduce_heads(product, weight, scale)
        return self.scale_score(self.sum_heads(product, weight), scale)

    def score(self, inputs: LayerInputs, trace: Trace) -> StageTensors:
        visible = self.visible(inputs)
        width = int(visible.max()) if len(visible) else 0
        out = torch.full((len(visible), width), -math.inf, device=visible.device)
        query, scale = self.score_query(trace)
        weight = self.fold_weight(trace.value("head_weight"), scale)
        for request, offset in enumerate(inputs.entry_offset[:-1]):
            rows = (inputs.row_request == request).nonzero().squeeze(1)
            if len(rows):
                out[rows] = self.score_request(trace, query[rows], weight[rows], offset, visible[rows], width)
        return {"value": out}

    def score_request(
        self, trace: Trace, query: Tensor, weight: Tensor, offset: int, visible: Tensor, width: int
    ) -> Tensor:
        """Scores of one request's rows, [r, width], -inf past each row's visible entries; bounded memory."""
        out = torch.full((len(query), width), -math.inf, device=query.device)
        block = max(64, SCORE_BYTES // (query.shape[0] * query.shape[1] * query.element_size()))
        last = int(visible.max())
        for start in range(0, last, block):
            stop = min(start + block, last)
            key, scale = self.score_key(trace, slice(offset + start, offset + stop))
            product = self.activate(self.dot(query, key))
            out[:, start:stop] = self.combine(product, weight, scale)
        return self.mask(out, visible)

    def mask(self, score: Tensor, visible: Tensor) -> Tensor:
        """-inf past each row's visible entries: [r, n], [r] -> [r, n]."""
        entry = torch.arange(score.shape[1], device=score.device)
        return score.masked_fill(entry >= visible.unsqueeze(1), -math.inf)

    # topk -------------------------------------------------------------------------------------------------------------

    def select(self, score: Tensor, k: int) -> Tensor:
        """The k largest of one row's visible scores [n], int64 entries; all of them in order when n <= k, unread.

        Exact; of scores equal to the k-th the lower entries win. NaN ranks below everything.
        """
        if len(score) <= k:
            return torch.arange(len(score), device=score.device)
        score = score.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
        cut = score.topk(k).values[-1]
        above, equal = score > cut, score == cut
        room = k - above.sum()
        return (above | (equal & (equal.cumsum(0) <= room))).nonzero().squeeze(1)

    def topk(self, inputs: LayerInputs, trace: Trace) -> StageTensors:
        score, visible = trace.value("score"), self.visible(inputs)
        out = torch.full((len(score), inputs.config.index_topk), -1, dtype=torch.int32, device=score.device)
        for row, count in enumerate(visible.tolist()):
            chosen = self.select(score[row, :count], inputs.config.index_topk)
            out[row, : len(chosen)] = chosen.to(torch.int32)
        return {"value": out}


def _has_fp8_rows(stored: StageTensors) -> bool:
    """Whether keys or queries come as codes with one scale a row, as this path stores them."""
    codes, scale = stored.get("codes"), stored.get("scale")
    return codes is not None and scale is not None and codes.dtype == torch.uint8 and scale.shape[-1] == 1
