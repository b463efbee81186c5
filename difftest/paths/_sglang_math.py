"""Arithmetic of SGLang's DeepSeek-V4 kernels in torch: fp32 throughout, with the kernels' own operation order.

Used by the SGLang models only. It shares no code with `reference/` or `kernels/`, so that an error in one of them
cannot hide in another.
"""

import math

import torch
from torch import Tensor

from ..reference.config import LayerKind, ModelConfig

E4M3_MAX = 448.0
E2M1_MAX = 6.0
AMAX_FLOOR = 1e-4
"""Smallest amax a scale is made from (fp8 and fp4 stores alike); DeepSeek's own fp4 floor is far lower."""
E2M1_THRESHOLDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
E2M1_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_SIGN = 8
FP32_EXPONENT_BIAS = 127
FP32_MANTISSA_BITS = 23
UE8M0_NAN = 255


def rope_table(config: ModelConfig, kind: LayerKind, positions: Tensor) -> Tensor:
    """Cosine and sine of every RoPE pair at the given positions.

    positions int64 [n] -> fp32 [n, rope_dim / 2, 2]. Frequencies and angles are made in fp32, as the published
    `model.py` makes its table: `swa` layers use `rope_theta` alone, compressed layers `compress_rope_theta` with YaRN.
    Always made on the CPU, as SGLang makes its own: a frequency that a GPU's `pow` rounds the other way turns a pair by
    up to 0.06 rad at position 2^20.
    """
    dim = config.qk_rope_head_dim
    theta = config.rope_theta if kind == "swa" else config.compress_rope_theta
    exponent = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    frequency = 1.0 / theta**exponent
    if kind != "swa":
        frequency = _stretch(frequency, config, theta)
    angle = positions.cpu().to(torch.float32).unsqueeze(-1) * frequency
    return torch.view_as_real(torch.polar(torch.ones_like(angle), angle)).to(positions.device)


def _stretch(frequency: Tensor, config: ModelConfig, theta: float) -> Tensor:
    """YaRN: divides the low frequencies by `rope_factor`, keeps the high ones, and blends linearly in between."""
    dim = config.qk_rope_head_dim

    def pair_that_turns(turns: float) -> float:
        return dim * math.log(config.rope_original_max_position / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_that_turns(config.rope_beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(config.rope_beta_slow)), dim - 1)
    pair = torch.arange(dim // 2, dtype=torch.float32)
    keep = 1 - ((pair - low) / (high - low)).clamp(0, 1)
    return frequency / config.rope_factor * (1 - keep) + frequency * keep


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """RoPE on the last `2 * pairs` of the last axis, neighbours (2i, 2i+1) a pair.

    x fp32 [..., D], table fp32 [..., pairs, 2] broadcast against the leading axes -> fp32 [..., D].
    """
    width = 2 * table.shape[-2]
    real, imaginary = x[..., -width::2], x[..., 1 - width :: 2]
    cosine, sine = table.unbind(-1)
    turned = torch.stack((real * cosine - imaginary * sine, real * sine + imaginary * cosine), -1)
    return torch.cat((x[..., :-width], turned.flatten(-2)), -1)


def hadamard(x: Tensor) -> Tensor:
    """Orthonormal Hadamard transform of the last axis (a power of two), Sylvester order: butterflies, then one factor.

    fp32 [..., D] -> fp32 [..., D].
    """
    width = x.shape[-1]
    out = x
    for step in (1 << bit for bit in range(width.bit_length() - 1)):
        first, second = out.reshape(*x.shape[:-1], -1, 2, step).unbind(-2)
        out = torch.stack((first + second, first - second), -2).flatten(-3)
    return out * torch.tensor(width, dtype=x.dtype, device=x.device).rsqrt()


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x * rsqrt(mean(x^2) + eps) * weight in fp32; no weight for the per-head attention query. fp32 [..., D] both."""
    normed = x * (x.square().sum(-1, keepdim=True) / x.shape[-1] + eps).rsqrt()
    return normed if weight is None else normed * weight


def gated_pool(kv: Tensor, score: Tensor, ape: Tensor) -> Tensor:
    """Per channel: sum(kv * e) / sum(e) with e = exp(score + ape - max), one division at the end.

    kv, score fp32 [n, slots, D], ape fp32 [slots, D] -> fp32 [n, D].
    """
    gate = score + ape
    weight = (gate - gate.amax(1, keepdim=True)).exp()
    return (kv * weight).sum(1) / weight.sum(1)


def to_bf16(x: Tensor) -> Tensor:
    """Rounds to bf16 (nearest even) and back to fp32."""
    return x.to(torch.bfloat16).to(torch.float32)


def encode_e4m3(x: Tensor) -> Tensor:
    """fp32 -> e4m3fn codes uint8, nearest even; clamps to +-448 first, since torch's cast saturates only up to 500."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def decode_e4m3(codes: Tensor) -> Tensor:
    """e4m3fn codes uint8 -> fp32, exact."""
    return codes.view(torch.float8_e4m3fn).to(torch.float32)


def raw_scale(x: Tensor) -> Tensor:
    """fp32 scale of the last axis, not a power of two: max(1e-4, amax) / 448. fp32 [..., D] -> [..., 1]."""
    return x.abs().amax(-1, keepdim=True).clamp_min(AMAX_FLOOR) / E4M3_MAX


def ue8m0_scale(x: Tensor, largest: float) -> Tensor:
    """Power-of-two scale of the last axis as its ue8m0 byte: exponent of max(1e-4, amax) / largest, rounded up.

    fp32 [..., D] -> uint8 [...].
    """
    scale = x.abs().amax(-1).clamp_min(AMAX_FLOOR) / largest
    bits = scale.view(torch.int32)
    exponent = bits >> FP32_MANTISSA_BITS
    has_fraction = (bits & ((1 << FP32_MANTISSA_BITS) - 1)) != 0
    return (exponent + has_fraction.to(torch.int32)).to(torch.uint8)


def decode_ue8m0(exponent: Tensor) -> Tensor:
    """ue8m0 bytes -> fp32 powers of two, exact; byte 255 is NaN."""
    value = torch.exp2(exponent.to(torch.float32) - FP32_EXPONENT_BIAS)
    return value.masked_fill(exponent == UE8M0_NAN, math.nan)


def encode_ue8m0(scale: Tensor) -> Tensor:
    """fp32 powers of two -> ue8m0 bytes, exact; anything else is rounded down to one."""
    return (scale.view(torch.int32) >> FP32_MANTISSA_BITS).to(torch.uint8)


def encode_e2m1(x: Tensor) -> Tensor:
    """fp32 -> e2m1 codes uint8 (0-15) by strict thresholds: a tie goes down, and a value that rounds to zero is +0."""
    thresholds = torch.tensor(E2M1_THRESHOLDS, device=x.device)
    code = torch.bucketize(x.abs(), thresholds, right=False)
    return (code + E2M1_SIGN * ((x < 0) & (code > 0))).to(torch.uint8)


def decode_e2m1(codes: Tensor) -> Tensor:
    """e2m1 codes uint8 (0-15) -> fp32, exact."""
    levels = torch.tensor((*E2M1_LEVELS, *(-level for level in E2M1_LEVELS)), device=codes.device)
    return levels[codes.long()]
