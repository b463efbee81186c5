"""Hopper's fp8 tensor core and DeepGEMM's head reduction, as arithmetic: what paged scores are on an H100 or H200.

The rules were found by comparing candidates with scores recorded on an H200, which they give bit for bit. One
instruction takes 32 products and the accumulator; each product's exponent is the sum of its operands' exponents (its
significand is in [1, 4), a subnormal operand counts as 2^-6); all 33 addends are truncated to 13 bits below the largest
exponent and added exactly; the sum is truncated to a significand of 14 bits. The order of heads is that of
`sm90_fp8_paged_mqa_logits.cuh`.
"""

import torch
from torch import Tensor

PRODUCTS = 32
"""Products of one instruction: K of an fp8 WGMMA."""
FRACTION_BITS = 13
"""Bits below the largest exponent that an addend keeps, and fraction bits that the accumulator keeps."""
SMALLEST_EXPONENT = -6
"""Exponent of e4m3's smallest normal number, which its subnormals and zero share."""
FP32_BIAS, FP32_FRACTION_BITS, EXPONENT_MASK = 127, 23, 0xFF
BLOCK_BYTES = 1 << 22
"""Bytes of products held at a time; what a core's cache holds."""
LANES, PAIR = 4, 2
"""Threads that share a key's heads; neighbouring heads that one of them holds."""


def fp8_dot(query: Tensor, key: Tensor) -> Tensor:
    """Dot products as the tensor core accumulates them.

    query fp32 [m, D], key fp32 [n, D], values of e4m3, D a multiple of 32 -> fp32 [m, n]. About a hundred times the
    time of a matrix product.
    """
    out = torch.empty((len(query), len(key)), device=query.device)
    query_exponent, key_exponent = _operand_exponent(query), _operand_exponent(key)
    block = max(1, BLOCK_BYTES // (len(query) * PRODUCTS * out.element_size()))
    for start in range(0, len(key), block):
        part = slice(start, start + block)
        total = torch.zeros((len(query), len(key[part])), device=query.device)
        for k in range(0, query.shape[1], PRODUCTS):
            step = slice(k, k + PRODUCTS)
            product = query[:, None, step] * key[None, part, step]
            exponent = (query_exponent[:, None, step] + key_exponent[None, part, step]).amax(-1)
            total = _accumulate(total, product, exponent)
        out[:, part] = total
    return out


def _accumulate(total: Tensor, product: Tensor, exponent: Tensor) -> Tensor:
    """One instruction: total [m, n] plus product [m, n, 32], `exponent` int32 [m, n] being the products' largest."""
    exponent = torch.maximum(exponent, _exponent(total))
    unit = _power_of_two(FRACTION_BITS - exponent)
    addends = product.mul_(unit.unsqueeze(-1)).trunc_().sum(-1) + (total * unit).trunc_()
    kept = -1 << (FP32_FRACTION_BITS - FRACTION_BITS)
    return ((addends / unit).view(torch.int32) & kept).view(torch.float32)


def _exponent(x: Tensor) -> Tensor:
    """Exponent of fp32 values, int32; -127 for zero."""
    return ((x.view(torch.int32) >> FP32_FRACTION_BITS) & EXPONENT_MASK) - FP32_BIAS


def _operand_exponent(x: Tensor) -> Tensor:
    return _exponent(x.contiguous()).clamp_min(SMALLEST_EXPONENT)


def _power_of_two(exponent: Tensor) -> Tensor:
    return ((exponent + FP32_BIAS) << FP32_FRACTION_BITS).view(torch.float32)


def reduce_heads(product: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Scores from the products after ReLU, in the kernel's order of additions.

    product fp32 [r, H, n], weight fp32 [r, H], scale fp32 [n] -> fp32 [r, n]; H a multiple of 8. Head 8 j + 2 l + p
    lies in lane l. A lane adds its heads of either p over j by fused multiply-add (of the first two products the second
    is the rounded one), adds the two sums, applies the key's scale, and the lanes are then added in pairs.
    """
    rows, heads, entries = product.shape
    groups = heads // (LANES * PAIR)
    term = product.view(rows, groups, LANES, PAIR, entries)
    factor = weight.view(rows, groups, LANES, PAIR, 1)
    order = [1, 0, *range(2, groups)] if groups > 1 else [0]
    total = torch.zeros_like(term[:, 0])
    for group in order:
        total = (term[:, group].double() * factor[:, group] + total).float()
    lane = (total[:, :, 0] + total[:, :, 1]) * scale
    return (lane[:, 0] + lane[:, 1]) + (lane[:, 2] + lane[:, 3])
