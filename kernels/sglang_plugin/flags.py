"""What the environment asks of the plugin."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

BF16_INDEX_K = "SGLANG_DSV4_BF16_INDEX_K"
CAPTURE = "DIFFTEST_CAPTURE"
CAPTURE_LAYERS = "DIFFTEST_CAPTURE_LAYERS"
CAPTURE_STEPS = "DIFFTEST_CAPTURE_STEPS"
CAPTURE_ROWS = "DIFFTEST_CAPTURE_ROWS"
CAPTURE_BYTES = "DIFFTEST_CAPTURE_BYTES"
DEFAULT_BYTES = 1 << 30


class FlagError(ValueError):
    """A variable that does not say what it must; the message is one sentence."""


@dataclass(frozen=True)
class CaptureFlags:
    """What to capture.

    folder  where files go, one subfolder a rank.       layers  layer numbers; empty: the first layer with an indexer.
    steps   numbers of capturable steps, counted from 0.    rows    query tokens kept of a step.
    bytes   limit on what one rank writes in all.
    """

    folder: Path
    layers: tuple[int, ...] = ()
    steps: tuple[int, ...] = (0,)
    rows: int = 64
    bytes: int = DEFAULT_BYTES


@dataclass(frozen=True)
class Flags:
    """What the environment asks for; `capture` is None where nothing is to be captured."""

    bf16_index_k: bool = False
    capture: CaptureFlags | None = None


def read_flags(environ: Mapping[str, str] = os.environ) -> Flags:
    """The flags of `environ`. FlagError names the variable, its value and what it may be."""
    given = environ.get(BF16_INDEX_K, "")
    if given not in ("", "0", "1"):
        raise FlagError(f"{BF16_INDEX_K} is {given!r} and may only be 0 or 1: set one of them, or unset it")
    return Flags(bf16_index_k=given == "1", capture=_capture(environ))


def _capture(environ: Mapping[str, str]) -> CaptureFlags | None:
    folder = environ.get(CAPTURE, "")
    if not folder:
        return None
    plain = CaptureFlags(Path(folder))
    return CaptureFlags(
        folder=plain.folder,
        layers=_numbers(environ, CAPTURE_LAYERS, plain.layers),
        steps=_numbers(environ, CAPTURE_STEPS, plain.steps),
        rows=_positive(environ, CAPTURE_ROWS, plain.rows),
        bytes=_positive(environ, CAPTURE_BYTES, plain.bytes),
    )


def _numbers(environ: Mapping[str, str], name: str, default: tuple[int, ...]) -> tuple[int, ...]:
    given = environ.get(name, "")
    if not given:
        return default
    parts = given.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise FlagError(f"{name} is {given!r} and must be numbers from 0 on, separated by commas, such as 2,14")
    return tuple(int(part) for part in parts)


def _positive(environ: Mapping[str, str], name: str, default: int) -> int:
    given = environ.get(name, "")
    if not given:
        return default
    if not given.isdecimal() or int(given) == 0:
        raise FlagError(f"{name} is {given!r} and must be a whole number above 0")
    return int(given)
