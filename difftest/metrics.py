"""Measures what a path stored against the ball of what it should have stored."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .ball import Ball, distance_to, nearest
from .record import Worst
from .reference.formats import FORMATS, exponent

FP64_SLACK = 2.0**-40

SAMPLED = 8
"""Of so many elements one is looked at for how many codes its bound lets pass, a figure that is only shown."""

Locate = Callable[[tuple[int, ...]], dict[str, int]]
"""Turns an index of a judged tensor into named coordinates: {"request": 1, "entry": 70, "dim": 3}."""


def excess_of(distance: Tensor, rad: Tensor) -> Tensor:
    """distance / rad: the factor by which the bound would have to grow for the element to pass; 0 / 0, x / inf give 0.

    FP64_SLACK absorbs the judge's own rounding, where an unsure bit moves the exact value precisely onto the next tie.
    """
    return torch.where(distance == 0, 0.0, distance / (rad * (1 + FP64_SLACK)))


def ordinal(format_name: str, x: Tensor) -> Tensor:
    """Number of a format's value, counted from zero, int64: neighbours differ by one, so differences are distances in
    codes (or ULP)."""
    format_ = FORMATS[format_name]
    size = x.abs().clamp(max=format_.max)
    binade = exponent(size).clamp(min=format_.min_exponent)
    count = (binade - format_.min_exponent << format_.fraction) + (size / format_.step(size)).long()
    return torch.where(x < 0, -count, count)


def unravel(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Index of a flat position."""
    index: list[int] = []
    for size in reversed(shape):
        flat, place = divmod(flat, size)
        index.insert(0, place)
    return tuple(index)


def _root(square: float, unit: float) -> float:
    """sqrt(square / unit); sqrt(square) where there is no unit."""
    return math.sqrt(square / unit) if unit else math.sqrt(square)


@dataclass
class Tally:
    """Accumulates the judgement of one tensor, piece by piece, so that large tensors need not be held in fp64 whole.

    format   name of the format the values are stored in.   locate   names an element of the whole tensor.
    excess, worst     the largest factor on the bound that an element needs, and that element.
    equal, elements   how many values are exactly the rounded exact value, and of how many.
    code_distance     most codes (ULP) between a value and the rounded exact value; `code_allowed`: most that the
                      bounds let pass.
    unjudged          elements whose bound is infinite.
    """

    format: str
    locate: Locate
    excess: float = 0.0
    worst: Worst | None = None
    elements: int = 0
    equal: int = 0
    code_distance: int = 0
    code_allowed: int = 0
    unjudged: int = 0
    deviation: float = 0.0
    deviation_allowed: float = 0.0
    error_square: float = 0.0
    terms_square: float = 0.0
    size_square: float = 0.0
    allowed_square: float = 0.0
    largest_error: float = 0.0
    off_grid: list[tuple[int, ...]] = field(default_factory=list)

    def add(self, got: Tensor, ball: Ball, start: int = 0, terms: Tensor | None = None) -> None:
        """Judges a piece: got and ball of one shape, fp64; `start` is its first index on the tensor's first axis.

        A known exact value that is a tie, rounded the other way than declared, needs an infinite factor: no bound
        covers it.
        terms   sum|terms| of each element, the unit of `deviation`; without it errors are taken relative to the
                tensor's norm (`relative_error`).
        """
        if not got.numel():
            return
        distance = distance_to(self.format, ball.mid, got)
        rad = ball.rad.nan_to_num(nan=torch.inf, posinf=torch.inf)
        excess = excess_of(distance, rad)
        excess[(rad == 0) & (distance == 0) & (nearest(self.format, ball.mid) != got)] = torch.inf
        self.elements += got.numel()
        self._count_codes(got, ball.mid, rad, excess)
        self.unjudged += int(rad.isinf().sum())
        peak = int(excess.argmax())
        if self.worst is None or float(excess.flatten()[peak]) > self.excess:
            self.excess = float(excess.flatten()[peak])
            self.worst = self._worst(peak, got, ball.mid, rad, start)
        self._sum(got, ball.mid, rad, terms)

    def _count_codes(self, got: Tensor, mid: Tensor, rad: Tensor, excess: Tensor) -> None:
        want = nearest(self.format, mid)
        off = (want != got) & got.isfinite() & rad.isfinite()
        passing_most = 0
        self.equal += int((want == got).sum())
        if bool(off.any()):
            apart = (ordinal(self.format, got[off]) - ordinal(self.format, want[off])).abs()
            self.code_distance = max(self.code_distance, int(apart.max()))
            passing_most = int(apart[excess[off] <= 1].amax()) if bool((excess[off] <= 1).any()) else 0
        self._count_allowed(mid, rad, passing_most)

    def _count_allowed(self, mid: Tensor, rad: Tensor, passing_most: int) -> None:
        """Most codes the bounds let pass: over every SAMPLED-th element, and over those that did pass."""
        self.code_allowed = max(self.code_allowed, passing_most)
        mid, rad = mid.flatten()[::SAMPLED], rad.flatten()[::SAMPLED]
        low, high = nearest(self.format, mid - rad), nearest(self.format, mid + rad)
        open_ = (low != high) & rad.isfinite()
        if bool(open_.any()):
            apart = ordinal(self.format, high[open_]) - ordinal(self.format, low[open_])
            self.code_allowed = max(self.code_allowed, int(apart.max()))

    def _worst(self, peak: int, got: Tensor, mid: Tensor, rad: Tensor, start: int) -> Worst:
        first, *rest = unravel(peak, tuple(got.shape))
        values = (float(tensor.flatten()[peak]) for tensor in (got, mid, rad))
        return Worst(self.locate((first + start, *rest)), *values)

    def _sum(self, got: Tensor, mid: Tensor, rad: Tensor, terms: Tensor | None) -> None:
        error = (got - mid).abs()
        judged = rad.isfinite() & got.isfinite()
        if not bool(judged.all()):
            error, rad, mid = error[judged], rad[judged], mid[judged]
            terms = terms[judged] if terms is not None else None
        if not error.numel():
            return
        # The bound of an element's error is its radius and half a step of the format it is stored in.
        allowed = rad + FORMATS[self.format].step(mid.abs() + rad) / 2
        self.largest_error = max(self.largest_error, float(error.max()))
        self.error_square += float(error.square().sum())
        self.size_square += float(mid.square().sum())
        self.allowed_square += float(allowed.square().sum())
        if terms is not None:
            self.terms_square += float(terms.square().sum())
            unit = terms.clamp(min=torch.finfo(torch.float64).tiny)
            live = terms > 0
            self.deviation = max(self.deviation, float((error / unit)[live].max()) if bool(live.any()) else 0.0)
            self.deviation_allowed = max(
                self.deviation_allowed, float((allowed / unit)[live].max()) if bool(live.any()) else 0.0
            )

    @property
    def equal_share(self) -> float:
        return self.equal / self.elements if self.elements else 1.0

    @property
    def relative_error(self) -> float:
        """Norm of the error over the norm of the exact tensor."""
        return _root(self.error_square, self.size_square)

    @property
    def relative_allowed(self) -> float:
        return _root(self.allowed_square, self.size_square)

    @property
    def rms_over_terms(self) -> float:
        """Root mean square error over the root mean square of sum|terms|."""
        return _root(self.error_square, self.terms_square)
