"""All cases, by id and by profile."""

from .case import Case, Profile

CASES = (
    Case("gaussian-4133", "gaussian", (4133,), rows=24, profiles=("smoke", "default", "full", "gpu"), says="whole"),
    Case("gaussian-chunked-2999", "gaussian", (2999, 2310, 2570), mode="chunked", chunk=1021, rows=24, says="ragged"),
    Case("gaussian-decode-2571", "gaussian", (2571, 2210), mode="decode", decode_tokens=6, says="ragged decode"),
    Case(
        "decode-1048576", "gaussian", (1048576,), mode="decode", decode_tokens=8, pooled_prefix=262140,
        profiles=("gpu",), says="8 rows over 262,144 entries",
    ),
)  # fmt: skip


def all_cases() -> dict[str, Case]:
    """Every built-in case by id."""
    return {case.id: case for case in CASES}


def profile(name: Profile) -> list[Case]:
    """Cases that profile `name` runs, in registry order."""
    return [case for case in CASES if name in case.profiles]
