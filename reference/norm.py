"""Root-mean-square norm."""

from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps) over the last axis, in fp64 (`model.py`, RMSNorm).

    x [..., D] any float dtype; weight [D] or None for a norm without weight (attention query). Returns [..., D] fp64.
    """
    exact = x.double()
    normed = exact * (exact.square().mean(-1, keepdim=True) + eps).rsqrt()
    return normed if weight is None else normed * weight.double()
