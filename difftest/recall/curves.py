"""Recall against context length, and what kind of curve it is: no loss, a loss, a cliff, no better than chance."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from .sweep_cell import Cell

Shape = Literal[
    "not exercised",
    "crashed",
    "loss without choice",
    "no loss",
    "rare loss",
    "loss, no cliff",
    "cliff near 4.5k",
    "cliff elsewhere",
]
CLIFF_SHAPES: tuple[Shape, ...] = ("cliff near 4.5k", "cliff elsewhere")

HIGH, HALF = 0.9, 0.5
"""A curve starts to fall where its fit crosses HIGH, and is down where it crosses HALF."""
SHARP = 3.0
"""A fall from HIGH to HALF within this factor of length is a cliff. A selection that picks at random does it within
1.8, whatever k: recall is then 4 k / length, which is 0.9 at 4.4 k tokens and 0.5 at 8 k."""
NEAR = (4509 / 2**0.5, 4509 * 2**0.5)
"""Lengths that count as "near 4.5k": within half an octave of 4,509. A random choice of 512 is down at 4,096; public
reports pass at 3,611 and fail at 5,294."""
RATIO = 4
"""Tokens an entry of an indexed layer stands for."""
CONFIDENCE = 1.96
"""Normal quantile of the 95 % intervals."""


@dataclass(frozen=True)
class Point:
    """One length of a curve: how many of `total` needles were found; `chance`: k / visible, what picking at random
    finds; `exercised`: whether rows had to choose."""

    length: int
    found: int
    total: int
    chance: float
    exercised: bool

    @property
    def recall(self) -> float:
        return self.found / self.total


@dataclass(frozen=True)
class Curve:
    """A variant's recall under one distractor model and one k.

    half, onset   token lengths at which the fitted curve crosses HALF and HIGH, interpolated in log length; None where
                  it stays above.
    lift          (found - expected by chance) / (all - expected by chance) over exercised lengths: 1 is all, 0 chance.
    lift_low, lift_high   its 95 % interval.
    unexplained   lost needles whose margin is 1 or more of the declared error bound, and those of `unforced`.
    lost          lost needles of rows that had to choose; `unforced`: lost ones of rows that could select all they see.
    margin_lost   largest margin of a lost needle, in units of the bound; None when none was lost.
    below         needles left out because the exact selection does not hold them either.
    """

    distractor: str
    variant: str
    group: str
    k: int
    points: tuple[Point, ...]
    onset: float | None
    half: float | None
    lift: float
    lift_low: float
    lift_high: float
    lost: int
    unexplained: int
    margin_lost: float | None
    below: int = 0
    unforced: int = 0
    error: str = ""

    @property
    def exercised(self) -> list[Point]:
        return [point for point in self.points if point.exercised]

    @property
    def total(self) -> int:
        return sum(point.total for point in self.exercised)

    @property
    def at_chance(self) -> bool:
        """Whether the selection finds needles no better than picking at random would."""
        return bool(self.exercised) and self.lift_low <= 0.0

    @property
    def shape(self) -> Shape:
        if self.error:
            return "crashed"
        if self.unforced:
            return "loss without choice"
        if not self.exercised:
            return "not exercised"
        if self.half is None or self.onset is None:
            worst = min(point.recall for point in self.exercised)
            if not self.lost:
                return "no loss"
            return "rare loss" if self.onset is None and worst >= HIGH else "loss, no cliff"
        if self.half > SHARP * self.onset:
            return "loss, no cliff"
        return "cliff near 4.5k" if NEAR[0] <= self.half <= NEAR[1] else "cliff elsewhere"


def curves(cells: Iterable[Cell]) -> list[Curve]:
    """One curve a (distractor, variant, k), in order of appearance."""
    by: dict[tuple[str, str, str, int], list[Cell]] = {}
    for cell in cells:
        by.setdefault((cell.distractor, cell.variant, cell.group, cell.k), []).append(cell)
    return [_curve(*key, found) for key, found in by.items()]


def _curve(distractor: str, variant: str, group: str, k: int, cells: Sequence[Cell]) -> Curve:
    errors = [cell.error for cell in cells if cell.error]
    every, cells = cells, [cell for cell in cells if not cell.below]
    points = tuple(_point(length, cells) for length in sorted({cell.length for cell in cells if cell.result}))
    lost = [cell for cell in cells if cell.exercised and cell.result and not cell.result.selected]
    unforced = sum(not cell.exercised and not cell.result.selected for cell in cells if cell.result)
    margins = [cell.result.margin for cell in lost if cell.result and cell.result.margin is not None]
    chosen = [point for point in points if point.exercised]
    lift, low, high = _lift(chosen)
    # Up to 4 k tokens every entry is selected: the fit starts there, at 1, and takes only lengths that had to choose.
    lengths = [RATIO * k, *(point.length for point in chosen)]
    fitted = [1.0, *falling([point.recall for point in chosen], [point.total for point in chosen])]
    return Curve(
        distractor=distractor,
        variant=variant,
        group=group,
        k=k,
        points=points,
        onset=crossing(lengths, fitted, HIGH),
        half=crossing(lengths, fitted, HALF),
        lift=lift,
        lift_low=low,
        lift_high=high,
        lost=len(lost),
        unexplained=sum(not cell.explained for cell in lost) + unforced,
        unforced=unforced,
        margin_lost=max(margins) if margins else None,
        below=len(every) - len(cells),
        error=errors[0] if errors else "",
    )


def _point(length: int, cells: Sequence[Cell]) -> Point:
    here = [cell for cell in cells if cell.length == length and cell.result]
    found = sum(bool(cell.result and cell.result.selected) for cell in here)
    return Point(length, found, len(here), min(1.0, here[0].k / here[0].visible), here[0].exercised)


def falling(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The non-increasing curve nearest to `values` in weighted least squares (pool adjacent violators)."""
    blocks: list[tuple[float, float, int]] = []
    for value, weight in zip(values, weights, strict=True):
        blocks.append((value, weight, 1))
        while len(blocks) > 1 and blocks[-2][0] < blocks[-1][0]:
            (v1, w1, n1), (v2, w2, n2) = blocks[-2:]
            blocks[-2:] = [((v1 * w1 + v2 * w2) / (w1 + w2), w1 + w2, n1 + n2)]
    return [value for value, _, count in blocks for _ in range(count)]


def crossing(lengths: Sequence[int], fitted: Sequence[float], level: float) -> float | None:
    """The length at which a falling curve that starts at 1 passes below `level`, interpolated in log length; None if it
    never does."""
    if fitted[-1] >= level:
        return None
    pairs = pairwise(zip(lengths, fitted, strict=True))
    (x1, y1), (x2, y2) = next((left, right) for left, right in pairs if left[1] >= level > right[1])
    share = (y1 - level) / (y1 - y2)
    return math.exp(math.log(x1) + share * (math.log(x2) - math.log(x1)))


def _lift(points: Sequence[Point]) -> tuple[float, float, float]:
    """Share of what chance leaves that was found, with its interval; (1, 1, 1) when nothing was exercised."""
    total = sum(point.total for point in points)
    expected = sum(point.total * point.chance for point in points)
    if not points or total == expected:
        return 1.0, 1.0, 1.0
    found = sum(point.found for point in points)
    low, high = wilson(found, total)
    scale = total / (total - expected)
    return tuple((share - expected / total) * scale for share in (found / total, low, high))  # type: ignore[return-value]


def wilson(found: int, total: int) -> tuple[float, float]:
    """95 % interval of a share (Wilson's score interval)."""
    if not total:
        return 0.0, 1.0
    share, square = found / total, CONFIDENCE**2
    centre = share + square / (2 * total)
    half = CONFIDENCE * math.sqrt(share * (1 - share) / total + square / (4 * total**2))
    return max(0.0, (centre - half) / (1 + square / total)), min(1.0, (centre + half) / (1 + square / total))
