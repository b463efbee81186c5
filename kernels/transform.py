"""Device functions that the store and the query kernels share: interleaved rotation and the 128-point Hadamard
transform.

Both work on pairs: a block of entries [N, 128] is held as its even and its odd dims, two fp32 blocks [N, 64].
"""

import triton.language as tl

from .interpreter import Device

PAIRS = tl.constexpr(64)
FIRST_ROPE_PAIR = tl.constexpr(32)
ROPE_ELEMENTS = tl.constexpr(64)
HADAMARD_STAGES = tl.constexpr(6)
HADAMARD_SCALE = tl.constexpr(128**-0.5)


@Device
def rotate(even, odd, table, position, mask):
    """Rotates pairs 32..63 (dims 64..127) of every row by its table row; the first 32 pairs are turned by the angle
    0.
    """
    pair = tl.arange(0, PAIRS)[None, :]
    at = table + position[:, None] * ROPE_ELEMENTS + 2 * (pair - FIRST_ROPE_PAIR)
    rotated = mask[:, None] & (pair >= FIRST_ROPE_PAIR)
    cosine = tl.load(at, mask=rotated, other=1.0)
    sine = tl.load(at + 1, mask=rotated, other=0.0)
    return even * cosine - odd * sine, even * sine + odd * cosine


@Device
def butterfly(block, N: tl.constexpr):
    """Unscaled Hadamard transform (Sylvester order) over the last axis of fp32 [N, 64]: 6 stages of sums and
    differences.
    """
    for stage in tl.static_range(HADAMARD_STAGES):
        split = tl.reshape(block, (N, PAIRS >> (stage + 1), 2, 1 << stage))
        left, right = tl.split(tl.permute(split, (0, 1, 3, 2)))
        joined = tl.permute(tl.join(left + right, left - right), (0, 1, 3, 2))
        block = tl.reshape(joined, (N, PAIRS))
    return block


@Device
def hadamard(even, odd, N: tl.constexpr):
    """Orthonormal 128-point Hadamard transform of rows held as even and odd dims; returns even and odd dims."""
    total = butterfly(even + odd, N)
    difference = butterfly(even - odd, N)
    return total * HADAMARD_SCALE, difference * HADAMARD_SCALE
