"""Model in torch of SGLang's fp4 index path (`--enable-deepseek-v4-fp4-indexer`), which its GPUs need Blackwell for.

Sources: SGLang 0.5.23, `fused_norm_rope_v2.cuh` (key) and `main_norm_rope.cuh` (query): 64 bytes of packed e2m1 codes
and four ue8m0 scales an entry, thresholds that send a tie down, bf16 roundings in the query that the key does not have.
"""

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from ..reference.inputs import LayerInputs
from ..trace import Trace
from . import _sglang_math as math_
from .base import Rounding
from .planar_pages import PlanarPages
from .sglang_fp8_model import SGLANG_FP8, SglangFp8Model

BLOCK = 32
"""Codes that share a scale."""
CODES_PER_BYTE = 2
CODE_BITS = 4
CODE_MASK = (1 << CODE_BITS) - 1


class SglangFp4Model(SglangFp8Model):
    """SGLang's fp4 index path. Pooling, selection, latents and attention are the fp8 path's."""

    name = "sglang-fp4-model"
    says: ClassVar[str] = "torch model of SGLang's fp4 index kernels, at every rounding point"
    declares = replace(
        SGLANG_FP8,
        key=Rounding(stored="e2m1_ties_down"),
        query=Rounding(rotated="bf16", transformed="bf16", stored="e2m1_ties_down"),
    )

    def __init__(self) -> None:
        super().__init__()

    def quantise_key(self, key: Tensor) -> tuple[Tensor, Tensor]:
        """fp32 [..., D] -> e2m1 codes uint8 [..., D] (one a byte) and fp32 power-of-two scales [..., D / 32]."""
        blocks = key.reshape(*key.shape[:-1], -1, BLOCK)
        scale = math_.decode_ue8m0(math_.ue8m0_scale(blocks, math_.E2M1_MAX))
        return math_.encode_e2m1(blocks / scale.unsqueeze(-1)).flatten(-2), scale

    def quantise_query(self, query: Tensor) -> tuple[Tensor, Tensor]:
        return self.quantise_key(query)

    def prepare_query(self, inputs: LayerInputs, query: Tensor) -> Tensor:
        """RoPE -> bf16, Hadamard -> bf16: fp32 [R, H, D] -> fp32 [R, H, D] of bf16 values."""
        table = self.rope_table(inputs, inputs.row_position).unsqueeze(1)
        return math_.to_bf16(self.hadamard(math_.to_bf16(self.rotate(query, table))))

    def page_layout(self, inputs: LayerInputs) -> PlanarPages:
        """64 entries of 64 code bytes, then 64 times 4 scale bytes: 4,352 bytes."""
        width = inputs.config.index_head_dim
        return PlanarPages(inputs.page_size, width // CODES_PER_BYTE, width // BLOCK)

    def pack_page(self, layout: PlanarPages, pool: Tensor, slots: Tensor, codes: Tensor, scale: Tensor) -> None:
        """Writes codes uint8 [n, D], two a byte with the even one in the low bits, and scales fp32 [n, D / 32]."""
        exponents = math_.encode_ue8m0(scale)
        layout.write(pool, slots, codes[:, 0::2] | codes[:, 1::2] << CODE_BITS, exponents)

    def unpack_page(self, layout: PlanarPages, pool: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Codes uint8 [n, D] and scales fp32 [n, D / 32] at `slots` int64 [n]."""
        packed, exponents = layout.read(pool, slots)
        codes = torch.stack((packed & CODE_MASK, packed >> CODE_BITS), -1).flatten(-2)
        return codes, math_.decode_ue8m0(exponents)

    def dequantise(self, codes: Tensor, scale: Tensor) -> Tensor:
        """Codes uint8 [..., D] times power-of-two scales fp32 [..., D / 32]: fp32 [..., D], exact in bf16."""
        blocks = math_.decode_e2m1(codes).reshape(*codes.shape[:-1], -1, BLOCK)
        return (blocks * scale.unsqueeze(-1)).flatten(-2)

    def score_query(self, trace: Trace) -> tuple[Tensor, Tensor]:
        """The dequantised query: the tensor core takes the block scales, and none is left for the head weight."""
        value = trace.value("index_q")
        return value, torch.ones_like(value[..., 0])

    def score_key(self, trace: Trace, entries: slice) -> tuple[Tensor, Tensor]:
        value = trace.value("index_k")[entries]
        return value, torch.ones_like(value[:, 0])
