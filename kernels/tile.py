"""How a score kernel is cut into tiles: candidates, the choice for a shape, and the record of measured choices.

`choose` answers from measurements recorded on this GPU (`record`), else from the defaults below, which were measured
on an H200. Records live in one JSON file in the user's cache directory, keyed by GPU, kind of read and the shape
rounded up to powers of two; a benchmark prints the choice it used.
"""

import json
import os
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import torch

Kind = Literal["decode", "prefill"]
KernelName = Literal["triton", "hopper", "hopper four"]

RECORDS = "score-tiles.json"
CACHE_VARIABLE = "DIFFTEST_KERNELS_CACHE"


@dataclass(frozen=True)
class Tile:
    """One way to run the score kernel.

    keys        keys multiplied at once, a multiple of 64.         group   queries of one request multiplied at once.
    warps, stages          Triton's num_warps and num_stages.
    programs    persistent programs per multiprocessor; 0 runs one program for each group and share of `split` key
    blocks. descriptor  read pages through tensor descriptors (the copy engine where the GPU has one).
    kernel      triton, or hopper for the kernels of `hopper.py`, which have no other choices; hopper four is their
                prefill with four warpgroups in place of two.
    """

    keys: int = 64
    group: int = 1
    warps: int = 4
    stages: int = 5
    programs: int = 3
    split: int = 64
    descriptor: bool = False
    kernel: KernelName = "triton"


HOPPER_TILE = Tile(kernel="hopper")
HOPPER_FOUR = Tile(kernel="hopper four")
"""Prefill on Hopper unless a record says otherwise; where its kernels do not serve the operands, `portable` says what
does. Decode is Triton's: both wait for the memory, and the Hopper kernel is a candidate for tuning."""

INTERPRETED_TILE = Tile(keys=8192, group=1, programs=2)
"""On the CPU every step costs about the same whatever its size, so steps are large."""

PERSISTENT_GROUPS = 1024
"""Groups whose lengths a program can scan at once; more of them run in the split schedule."""

HOPPER = 9
"""Compute capability (major) of Hopper GPUs."""

PREFILL_ROWS = 4
"""Consecutive rows of one request from which on a read counts as prefill."""

DECODE = {1: Tile(), 2: Tile(group=2, programs=2)}
"""By the largest power of two that divides the rows of a request (at most 3): tiles have a power of two of queries."""

PREFILL = Tile(group=4, stages=3, programs=0, split=1 << 20)
SMALL_PREFILL = Tile(group=2, stages=3, programs=0, split=1 << 20)
"""For GPUs whose registers or shared memory do not hold four queries at once."""

CANDIDATES: dict[Kind, tuple[Tile, ...]] = {
    "decode": (
        HOPPER_TILE,
        *(Tile(stages=stages, programs=programs) for stages, programs in ((5, 2), (5, 3), (7, 2))),
        *(Tile(stages=5, programs=0, split=split) for split in (8, 16, 64)),
    ),
    "prefill": (
        HOPPER_TILE,
        HOPPER_FOUR,
        PREFILL,
        SMALL_PREFILL,
        Tile(group=2, stages=4, programs=0, split=1 << 20),
    ),
}


def candidates(kind: Kind, group: int = 1) -> tuple[Tile, ...]:
    """Tiles worth measuring: for decode those of `group` queries a request, for prefill all."""
    if kind == "prefill" or group == 1:
        return CANDIDATES[kind]
    return tuple(
        tile if tile.kernel != "triton" else Tile(**{**asdict(tile), "group": group & -group})
        for tile in CANDIDATES[kind]
        if tile.keys == Tile.keys
    )


def choose(kind: Kind, rows: int, width: int, group: int, device: torch.device) -> Tile:
    """The tile for a shape on `device`: the recorded one, else the default. The CPU has its own."""
    if device.type == "cpu":
        return INTERPRETED_TILE
    return _choice(os.environ.get(CACHE_VARIABLE), kind, _pow2(rows), _pow2(width), group, device)


@lru_cache(maxsize=1024)
def _choice(folder: str | None, kind: Kind, rows: int, width: int, group: int, device: torch.device) -> Tile:
    """`choose` on a GPU, remembered: reading the device's name and the records takes longer than a short launch."""
    found = _records(records_file()).get(shape_key(kind, rows, width, group, device))
    if found is not None:
        return found
    if kind == "prefill" and torch.cuda.get_device_capability(device)[0] == HOPPER:
        return HOPPER_FOUR
    return portable(kind, group, device)


def portable(kind: Kind, group: int, device: torch.device) -> Tile:
    """The default tile of the Triton kernel, which runs on any GPU."""
    if device.type == "cpu":
        return INTERPRETED_TILE
    if kind == "prefill":
        return PREFILL if torch.cuda.get_device_capability(device)[0] == HOPPER else SMALL_PREFILL
    return DECODE[min(2, group & -group)]


def record(kind: Kind, rows: int, width: int, group: int, device: torch.device, tile: Tile) -> None:
    """Keeps `tile` as the choice for this shape on this GPU, for this and later processes."""
    file = records_file()
    known = {**_records(file), shape_key(kind, rows, width, group, device): tile}
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps({key: asdict(value) for key, value in known.items()}, indent=1, sort_keys=True))
    part.replace(file)
    _records.cache_clear()
    _choice.cache_clear()


def shape_key(kind: Kind, rows: int, width: int, group: int, device: torch.device) -> str:
    """Key of a record: GPU, kind, queries a request, rows and width rounded up to powers of two."""
    gpu = torch.cuda.get_device_name(device)
    return f"{gpu}/{kind}/{group}/{_pow2(rows)}x{_pow2(width)}"


def cache_folder() -> Path:
    """Where this package keeps what it built or measured: DIFFTEST_KERNELS_CACHE, else the user's cache directory."""
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "difftest-kernels"


def records_file() -> Path:
    return cache_folder() / RECORDS


@lru_cache(maxsize=4)
def _records(file: Path) -> dict[str, Tile]:
    """Recorded tiles; an unreadable or foreign file counts as empty, since it only costs speed."""
    try:
        return {key: Tile(**value) for key, value in json.loads(file.read_text()).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _pow2(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()
