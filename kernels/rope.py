"""The rotary table of a compressed layer, as the published model makes it, in the form the kernels read."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .layout import ROPE_DIM


@dataclass(frozen=True)
class Yarn:
    """YaRN constants of `config.json`: rope_scaling of DeepSeek-V4 and compress_rope_theta (the base of compressed
    layers).
    """

    theta: float = 160000.0
    factor: float = 16.0
    original_positions: int = 65536
    beta_fast: float = 32.0
    beta_slow: float = 1.0


def frequencies(yarn: Yarn) -> Tensor:
    """Radians per position of each pair, fp32 [32]; interpolated by `factor` below the YaRN ramp (model.py,
    precompute_freqs_cis).
    """
    plain = 1.0 / (yarn.theta ** (torch.arange(0, ROPE_DIM, 2, dtype=torch.float32) / ROPE_DIM))

    def dimension(turns: float) -> float:
        return ROPE_DIM * math.log(yarn.original_positions / (turns * 2 * math.pi)) / (2 * math.log(yarn.theta))

    low = max(math.floor(dimension(yarn.beta_fast)), 0)
    high = min(math.ceil(dimension(yarn.beta_slow)), ROPE_DIM - 1)
    ramp = (torch.arange(ROPE_DIM // 2, dtype=torch.float32) - low) / (max(high, low + 0.001) - low)
    keep = 1 - ramp.clamp(0, 1)
    return plain / yarn.factor * (1 - keep) + plain * keep


def rope_table(positions: Tensor, yarn: Yarn | None = None) -> Tensor:
    """Cosine and sine, interleaved, fp32 [*positions, 64] on the device of `positions`; angles are fp32 products, as
    published.

    Made on the CPU, so that every device reads the same bits.
    """
    angle = positions.cpu().to(torch.float32)[..., None] * frequencies(yarn or Yarn())
    return torch.view_as_real(torch.polar(torch.ones_like(angle), angle)).flatten(-2).to(positions.device)


def as_table(table: Tensor) -> Tensor:
    """A table as fp32 [P, 64]: takes that, or the complex64 [P, 32] that serving code keeps. ValueError for anything
    else.
    """
    if table.dtype == torch.complex64:
        table = torch.view_as_real(table).flatten(-2)
    if table.dtype != torch.float32 or table.dim() != 2 or table.shape[1] != ROPE_DIM or not table.is_contiguous():
        raise ValueError(
            f"rope table is {table.dtype} {list(table.shape)}: give contiguous fp32 [positions, {ROPE_DIM}] of "
            f"interleaved cosine and sine, or complex64 [positions, {ROPE_DIM // 2}]"
        )
    return table
