"""FlashMLA's KV cache of DeepSeek-V4: 584 bytes a token.

A page holds, for each of its tokens, 576 data bytes (448 e4m3 codes of the no-RoPE dims, then 64 bf16 RoPE dims), after
those 8 scale bytes a token (7 ue8m0, one per 64 codes, and one of padding), and is padded to a multiple of 576 bytes:
37,440 bytes for 64 tokens. Source: SGLang 0.5.23, `deepseek_v4/kv_layout.cuh`, layout V4.
"""

import torch
from torch import Tensor

from ._sglang_math import decode_e4m3, decode_ue8m0
from .planar_pages import PlanarPages

NOPE_DIMS = 448
ROPE_DIMS = 64
BLOCK = 64
"""Codes that share a scale."""
BLOCKS = NOPE_DIMS // BLOCK
DATA_BYTES = NOPE_DIMS + 2 * ROPE_DIMS
SCALE_BYTES = 8
TOKEN_BYTES = DATA_BYTES + SCALE_BYTES


def flashmla_pages(page_size: int) -> PlanarPages:
    """Layout of a page of `page_size` tokens."""
    return PlanarPages(page_size, DATA_BYTES, SCALE_BYTES, align=DATA_BYTES)


def pack(layout: PlanarPages, pool: Tensor, slots: Tensor, codes: Tensor, exponents: Tensor, rope: Tensor) -> None:
    """Writes tokens at `slots` int64 [n]: codes uint8 [n, 448], exponents uint8 [n, 7], rope bf16 [n, 64].

    The padding byte of a scale row is left as it was, as the kernels leave it.
    """
    data = torch.cat((codes, rope.contiguous().view(torch.uint8)), -1)
    layout.write(pool, slots, data, exponents)


def unpack(layout: PlanarPages, pool: Tensor, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens at `slots` int64 [n]: codes uint8 [n, 448], exponents uint8 [n, 7], rope bf16 [n, 64]."""
    data, scales = layout.read(pool, slots)
    rope = data[:, NOPE_DIMS:].contiguous().view(torch.bfloat16)
    return data[:, :NOPE_DIMS], scales[:, :BLOCKS], rope


def dequantise(codes: Tensor, exponents: Tensor, rope: Tensor) -> Tensor:
    """fp32 [n, 512]: codes times their power of two, then the RoPE dims; exact in bf16 as attention reads it."""
    nope = decode_e4m3(codes.contiguous()).view(-1, BLOCKS, BLOCK) * decode_ue8m0(exponents).unsqueeze(-1)
    return torch.cat((nope.flatten(-2), rope.to(torch.float32)), -1)
