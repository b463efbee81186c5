"""Walsh-Hadamard transform in natural (Sylvester) order."""

import torch
from torch import Tensor


def hadamard(x: Tensor) -> Tensor:
    """Orthonormal Sylvester Hadamard transform of the last axis, in fp64 (`model.py`, rotate_activation).

    x [..., D] with D a power of two. Returns x @ S / sqrt(D), S[i, j] = (-1)^popcount(i & j); its own inverse.
    Raises ValueError when D is not a power of two.
    """
    width = x.shape[-1]
    if width & (width - 1) or not width:
        raise ValueError(f"hadamard needs a power-of-two width, and {width} is not one: check index_head_dim")
    done: Tensor = x.double()
    half = 1
    while half < width:
        low, high = torch.unflatten(done, -1, (-1, 2, half)).unbind(-2)
        done = torch.stack((low + high, low - high), -2).flatten(-3)
        half *= 2
    return done.mul(width**-0.5)
