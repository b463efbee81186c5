"""A measured kernel: the line of the table and of the JSON file."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

CeilingName = Literal["read", "copy", "matmul"]
FP8 = "fp8"


@dataclass(frozen=True)
class Ceilings:
    """What the card does at best, measured first.

    read    bytes per second of a reduction over memory that no cache holds.
    copy    bytes per second of a copy, read and written bytes together.
    matmul  bf16 operations per second of a square torch product under load, two a multiply-add.
    """

    read: float
    copy: float
    matmul: float

    def time_us(self, name: CeilingName, count: int) -> float:
        """Microseconds that `count` bytes (read, copy) or operations (matmul) take at the ceiling."""
        return count / float(getattr(self, name)) * 1e6


@dataclass(frozen=True)
class Row:
    """One kernel in one format on one shape.

    kernel, format, shape   what was run; `fp8` rows are SGLang's, the others ours or the naive version.
    us                      microseconds a launch, the median over rounds; None if it could not run (see `note`).
    bytes, flops            the least a launch must move, and what it multiplies and adds.
    share_of_ceiling        time at the ceiling over time taken.
    ratio_to_fp8            time over that of the fp8 row of the same kernel and shape; None without one.
    extra_bytes             memory allocated during a launch beyond its result.
    note                    the tile that ran, or why nothing did.
    """

    kernel: str
    format: str
    shape: str
    us: float | None
    bytes: int
    flops: int
    share_of_ceiling: float | None
    ratio_to_fp8: float | None
    extra_bytes: int | None
    note: str = ""


def rows_to_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    return [asdict(row) for row in rows]


def table(rows: Sequence[Row]) -> list[dict[str, str]]:
    """The rows for people: rates beside times, blank where there is no number."""
    return [
        {
            "kernel": row.kernel,
            "shape": row.shape,
            "format": row.format,
            "us": _text(row.us, ".2f"),
            "GB/s": _text(row.bytes / row.us / 1e3 if row.us else None, ",.0f"),
            "TFLOP/s": _text(row.flops / row.us / 1e6 if row.us and row.flops else None, ",.0f"),
            "of ceiling": _text(row.share_of_ceiling, ".1%"),
            "to fp8": _text(row.ratio_to_fp8, ".2f"),
            "extra": _size(row.extra_bytes),
            "note": row.note,
        }
        for row in rows
    ]


def _text(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _size(count: int | None) -> str:
    if not count:
        return "" if count is None else "0"
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count = round(count / 1000)
    return f"{count} GB"
