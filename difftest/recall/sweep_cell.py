"""The record of a sweep: one JSON line a needle and variant, appended as they come, and resumed from."""

import fcntl
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

SCHEMA = "difftest.sweep/1"
FILE = "sweep.jsonl"
Key = tuple[str, int, int, str, int, int]
"""Distractor, layer, seed, variant, k and longest length of a world: what is measured at once."""


@dataclass(frozen=True)
class Score:
    """What a variant did with one needle.

    selected  whether its top-k holds the needle.   rank  by its own scores, 1 is best; None for a NaN score.
    margin    exact score above the cut over the variant's declared error bound; None where nothing competes.
    spread    the same in standard deviations of the row's exact scores.
    mass      attention mass the needle holds in the heads that look for it; mass_all in all heads.
    loss      relative change of the attention output if only the needle is lost.
    moved     relative change of the output by the variant's whole selection against the exact one.
    """

    selected: bool
    rank: int | None
    margin: float | None
    spread: float
    mass: float
    mass_all: float
    loss: float
    moved: float


@dataclass(frozen=True)
class Cell:
    """One needle under one variant. `result` is None when the variant raised; `error` then says what."""

    distractor: str
    layer: int
    seed: int
    variant: str
    group: str
    k: int
    length: int
    depth: float
    entry: int
    visible: int
    result: Score | None
    error: str = ""

    @property
    def exercised(self) -> bool:
        """Whether the row had to choose: it sees more entries than it may select."""
        return self.visible > self.k

    @property
    def explained(self) -> bool:
        """Whether a lost needle lay within the variant's error bound of the cut."""
        margin = self.result.margin if self.result else None
        return margin is not None and margin < 1

    @property
    def below(self) -> bool:
        """Whether the exact selection does not hold this needle either: there is nothing to lose."""
        margin = self.result.margin if self.result else None
        return margin is not None and margin <= 0

    def to_json(self) -> str:
        return json.dumps({"kind": "cell", **_plain(asdict(self))})

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> "Cell":
        stored = raw.pop("result")
        if stored:
            numbers = {name: _number(value) for name, value in stored.items()}
            stored = Score(**numbers)
        return cls(**raw, result=stored)


def _plain(value: Any) -> Any:
    """Infinities and NaN as strings: JSON has no such numbers."""
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, str) else value


class Store:
    """The cells of one sweep in `folder/sweep.jsonl`. Use as a context manager; one process at a time.

    The first line holds the settings that decide the data. Cells of a (world, variant, k) are written together; opening
    an existing file drops a torn last line and incomplete sets, which are measured again. ValueError when the settings
    differ or the file is of another kind.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.file = folder / FILE
        self.settings = settings
        self.cells: dict[Key, list[Cell]] = {}
        self._lines: IO[str] | None = None

    def __enter__(self) -> Self:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self._lock = (self.file.parent / ".lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise ValueError(
                f"{self.file.parent} is in use by another sweep; wait for it or name another --out"
            ) from error
        try:
            if self.file.exists():
                self._resume()
            self._rewrite()
        except BaseException:
            self._lock.close()
            raise
        self._lines = self.file.open("a")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._lines:
            self._lines.close()
        self._lock.close()

    def add(self, key: Key, cells: list[Cell]) -> None:
        """Writes a whole set of cells and flushes, so that an interrupt leaves readable records."""
        assert self._lines is not None, "the store is not open"
        self._lines.write("".join(cell.to_json() + "\n" for cell in cells))
        self._lines.flush()
        self.cells[key] = cells

    def _resume(self) -> None:
        header, cells = read_file(self.file)
        changed = [name for name, value in self.settings.items() if header.get(name) != value]
        if changed:
            name = changed[0]
            raise ValueError(
                f"{self.file} was made with {name} {header.get(name)!r}, and now it is {self.settings[name]!r}; "
                "give another --out, or the same settings to resume"
            )
        for cell in cells:
            self.cells.setdefault(key_of(cell, longest_of(cell.length, self.settings)), []).append(cell)
        depths = len(self.settings["depths"])
        for key, found in list(self.cells.items()):
            wanted = depths * sum(
                1 for length in self.settings["lengths"] if longest_of(length, self.settings) == key[-1]
            )
            if len(found) != wanted or any(cell.error for cell in found):
                del self.cells[key]

    def _rewrite(self) -> None:
        part = self.file.with_suffix(".part")
        with part.open("w") as lines:
            lines.write(json.dumps({"kind": "settings", "schema": SCHEMA, "settings": self.settings}) + "\n")
            for cells in self.cells.values():
                lines.writelines(cell.to_json() + "\n" for cell in cells)
        part.replace(self.file)


def longest_of(length: int, settings: dict[str, Any]) -> int:
    """The longest length of the world that `length` belongs to."""
    from .sweep_world import groups

    return next(group[-1] for group in groups(tuple(settings["lengths"])) if length in group)


def key_of(cell: Cell, longest: int) -> Key:
    return cell.distractor, cell.layer, cell.seed, cell.variant, cell.k, longest


def read_file(file: Path) -> tuple[dict[str, Any], list[Cell]]:
    """Settings and cells of a sweep file. ValueError names the line that is no record; a torn last line is left out."""
    settings: dict[str, Any] = {}
    cells: list[Cell] = []
    for raw in _lines_of(file):
        if raw.pop("kind", None) == "settings":
            if raw.get("schema") != SCHEMA:
                raise ValueError(f"{file} has schema {raw.get('schema')!r}, this version reads {SCHEMA!r}")
            settings = raw["settings"]
        else:
            try:
                cells.append(Cell.from_dict(raw))
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{file} holds a line that is no cell of a sweep: {error!r}") from error
    if not settings:
        raise ValueError(f"{file} is no sweep: its first line holds no settings; give another --out")
    return settings, cells


def _lines_of(file: Path) -> Iterator[dict[str, Any]]:
    lines = file.read_text().split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            raw = json.loads(line)
        except ValueError as error:
            if number == len(lines):
                return
            raise ValueError(f"{file}:{number} is not JSON: {error}; delete the line or give another --out") from error
        if not isinstance(raw, dict):
            raise ValueError(f"{file}:{number} is a JSON {type(raw).__name__}, not a record")
        yield raw


def exercised(cells: Iterable[Cell]) -> list[Cell]:
    """The cells whose row had to choose and whose variant did not raise."""
    return [cell for cell in cells if cell.exercised and cell.result is not None]
