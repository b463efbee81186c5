"""Rotary position embedding: the published frequency tables, interleaved rotation and its inverse."""

import math

import torch
from torch import Tensor

from .config import LayerKind, ModelConfig


def frequencies(config: ModelConfig, kind: LayerKind) -> Tensor:
    """Angle per token of each rotated pair, [rope_dim / 2] fp32 on the CPU, computed in fp32 as `model.py` does.

    `swa` layers: rope_theta^(-2i/dim), no YaRN. `csa` and `hca` layers: compress_rope_theta with YaRN interpolation
    between the pairs that turn `beta_fast` and `beta_slow` times within the original context.
    """
    dim = config.qk_rope_head_dim
    theta = config.rope_theta if kind == "swa" else config.compress_rope_theta
    freq: Tensor = 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    if kind == "swa":
        return freq
    low = max(math.floor(_pair_turning(config.rope_beta_fast, config)), 0)
    high = min(math.ceil(_pair_turning(config.rope_beta_slow, config)), dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low if high != low else 1e-3)
    smooth = 1 - ramp.clamp(0, 1)
    return freq / config.rope_factor * (1 - smooth) + freq * smooth


def _pair_turning(turns: float, config: ModelConfig) -> float:
    """Number (fractional) of the pair that turns `turns` times within the original context length."""
    context = config.rope_original_max_position
    return (
        config.qk_rope_head_dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(config.compress_rope_theta))
    )


def rope_table(config: ModelConfig, kind: LayerKind, positions: Tensor) -> Tensor:
    """Published rotation factors, positions int64 [...] -> complex128 [..., rope_dim / 2] on the device of `positions`.

    Frequency, angle = position * frequency, cosine and sine are fp32 exactly as `model.py` (precompute_freqs_cis) makes
    them, and only then upcast: the table is an input of the layer, not something to improve on. Always made on the CPU,
    so that every device reads the same bits.
    """
    angle = positions.cpu().to(torch.float32)[..., None] * frequencies(config, kind)
    return torch.polar(torch.ones_like(angle), angle).to(device=positions.device, dtype=torch.complex128)


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotates the last rope_dim of the last axis; pair i is (2i, 2i + 1), multiplied by table[..., i]
    (`apply_rotary_emb`).

    x [..., D], table [..., rope_dim / 2] whose leading axes are the first axes of x (a table [R, .] serves x [R, H,
    D]). Returns fp64.
    """
    exact = x.double()
    table = table.reshape(*table.shape[:-1], *(1,) * (x.ndim - table.ndim), table.shape[-1])
    plain = x.shape[-1] - 2 * table.shape[-1]
    pairs = torch.view_as_complex(torch.unflatten(exact[..., plain:], -1, (-1, 2)).contiguous())
    return torch.cat((exact[..., :plain], torch.view_as_real(pairs * table).flatten(-2)), -1)


def rotate_inverse(x: Tensor, table: Tensor) -> Tensor:
    """Undoes `rotate`: multiplies by the conjugate table (attention epilogue of `model.py`)."""
    return rotate(x, table.conj())
