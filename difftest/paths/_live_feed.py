"""Upstream tensors in the formats that SGLang's kernels read; one that does not fit raises `CannotFeed`."""

import torch
from torch import Tensor

from ..trace import StageTensors
from .base import CannotFeed
from .flashmla_layout import BLOCK, BLOCKS, NOPE_DIMS

E4M3_MAX = 448.0
SCALE_FLOOR = 1e-4 / E4M3_MAX
"""Smallest scale that SGLang's stores write: amax is floored at 1e-4."""
UE8M0_BIAS = 127
LEAST_POWER = 2.0**-120
"""Scale of an all-zero block; small enough for every latent, large enough for its reciprocal to be normal."""
SCALE_STEPS = 2
"""Neighbours of amax / 448, in units in the last place, that are tried as the scale of a dequantised row."""


def fp8_rows(stored: StageTensors, stage: str) -> tuple[Tensor, Tensor]:
    """Codes uint8 [..., D] and scale fp32 [...] of the keys or queries in `stored`.

    Its own codes and scale where they give exactly its value, else a scale recovered from the value. CannotFeed names
    the first row that no e4m3 row with one fp32 scale equals.
    """
    value = stored["value"]
    if "codes" in stored and stored["codes"].shape == value.shape and stored["scale"].shape[-1] == 1:
        codes, scale = stored["codes"], stored["scale"]
        if torch.equal(decode_e4m3(codes) * scale, value):
            return codes.contiguous(), scale.squeeze(-1).contiguous()
    return _recover(value.float(), stage)


def decode_e4m3(codes: Tensor) -> Tensor:
    """fp32 values of e4m3fn codes uint8."""
    return codes.contiguous().view(torch.float8_e4m3fn).float()


def _encode_e4m3(x: Tensor) -> Tensor:
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).contiguous().view(torch.uint8)


def _recover(value: Tensor, stage: str) -> tuple[Tensor, Tensor]:
    amax = value.abs().amax(-1)
    guess = (amax / E4M3_MAX).clamp_min(SCALE_FLOOR)
    scale, codes = torch.zeros_like(guess), torch.zeros_like(value, dtype=torch.uint8)
    found = torch.zeros_like(guess, dtype=torch.bool)
    for candidate in (*_neighbours(guess), _pow2_ceil(guess)):
        tried = _encode_e4m3(value / candidate.unsqueeze(-1))
        fits = ((decode_e4m3(tried) * candidate.unsqueeze(-1)) == value).all(-1) & ~found
        scale, codes = torch.where(fits, candidate, scale), torch.where(fits.unsqueeze(-1), tried, codes)
        found |= fits
    if not bool(found.all()):
        row = tuple((~found).nonzero()[0].tolist())
        raise CannotFeed(
            f"{stage} row {row} is no e4m3 row with one fp32 scale, the format this path's scorer reads; "
            "substitute a path that stores e4m3, or substitute `score` instead"
        )
    return codes, scale


def _neighbours(scale: Tensor) -> list[Tensor]:
    """`scale` and the fp32 numbers up to SCALE_STEPS units in the last place away, nearest first."""
    bits = scale.contiguous().view(torch.int32)
    steps = sorted(range(-SCALE_STEPS, SCALE_STEPS + 1), key=abs)
    return [(bits + step).view(torch.float32) for step in steps]


def _pow2_ceil(x: Tensor) -> Tensor:
    """Smallest power of two that is at least x, for positive normal fp32 x."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp(torch.ones_like(x), exponent - (mantissa == 0.5).to(exponent.dtype))


def folded_weight(weight: StageTensors, scale: Tensor) -> Tensor:
    """Head weight fp32 [R, H] times the query scale [R, H], contiguous.

    The kernel's own product (`folded`) where dividing the scale out of it gives this weight, so that scores are the
    kernel's bit for bit; otherwise (weight or query substituted) the product is made here.
    """
    folded = weight.get("folded")
    if folded is not None and torch.equal(folded / scale, weight["value"]):
        return folded.contiguous()
    return (weight["value"].float() * scale).contiguous()


def latent_parts(value: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """FlashMLA's parts of latents fp32 [n, 512]: codes uint8 [n, 448], exponents uint8 [n, 7], RoPE dims bf16 [n, 64].

    A dequantised latent always fits: with the power of two made from its own amax every code stays exact. CannotFeed
    names the first row that does not.
    """
    value = value.float()
    blocks = value[:, :NOPE_DIMS].reshape(-1, BLOCKS, BLOCK)
    scale = _pow2_ceil((blocks.abs().amax(-1) / E4M3_MAX).clamp_min(LEAST_POWER))
    codes = _encode_e4m3(blocks / scale.unsqueeze(-1))
    rope = value[:, NOPE_DIMS:].to(torch.bfloat16)
    exact = ((decode_e4m3(codes) * scale.unsqueeze(-1)) == blocks).flatten(1).all(1)
    exact &= (rope.float() == value[:, NOPE_DIMS:]).all(1)
    if not bool(exact.all()):
        row = int((~exact).nonzero()[0])
        raise CannotFeed(
            f"kv.{name} row {row} is not e4m3 with a power-of-two scale a block of {BLOCK} and a bf16 RoPE tail, which "
            "this path's attention reads; substitute a path that stores fp8 latents"
        )
    exponents = (torch.frexp(scale).exponent - 1 + UE8M0_BIAS).to(torch.uint8)
    return codes.flatten(1), exponents, rope
