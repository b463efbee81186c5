"""Cutting work into slices that fit a memory budget."""

from collections.abc import Iterator

MAX_BYTES = 256 * 2**20
"""Default budget, in bytes, for the temporaries of one reference function."""


def slices(total: int, bytes_each: int, max_bytes: int = MAX_BYTES) -> Iterator[slice]:
    """Slices that cover range(total); the items of one, at `bytes_each` bytes, stay within `max_bytes` (one at least)."""
    count = max(1, max_bytes // max(1, bytes_each))
    for start in range(0, total, count):
        yield slice(start, min(total, start + count))
