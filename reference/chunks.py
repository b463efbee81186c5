"""Cutting work into slices that fit a memory budget."""

from collections.abc import Iterator

MAX_BYTES = 256 * 2**20
"""Default budget, in bytes, for the temporaries of one reference function."""


def slices(total: int, bytes_each: int, max_bytes: int = MAX_BYTES) -> Iterator[slice]:
    """Slices covering range(total): as many items of `bytes_each` bytes as fit `max_bytes`, and at least one."""
    count = max(1, max_bytes // max(1, bytes_each))
    for start in range(0, total, count):
        yield slice(start, min(total, start + count))
