"""Measures what a path stored against the ball of what it should have stored."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .ball import Ball, distance_off, nearest
from .record import Worst
from .reference.formats import FORMATS, exponent, power_of_two

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
    steps = (size / power_of_two(binade - format_.fraction)).long()
    count = (binade - format_.min_exponent << format_.fraction) + steps
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

    A GPU is waited for at every number read from it: a piece is reduced there and read in a few lists.
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

    def add(self, got: Tensor, ball: Ball, start: int = 0, terms: Tensor | None = None) -> None:
        """Judges a piece: got and ball of one shape, fp64; `start` is its first index on the tensor's first axis.

        A known exact value that is a tie, rounded the other way than declared, needs an infinite factor: no bound
        covers it.
        terms   sum|terms| of each element, the unit of `deviation`; without it errors are taken relative to the
                tensor's norm (`relative_error`).
        """
        if not got.numel():
            return
        shape, got, mid = tuple(got.shape), got.flatten(), ball.mid.flatten()
        rad = ball.rad.flatten().nan_to_num(nan=torch.inf, posinf=torch.inf)
        want = nearest(self.format, mid)
        off = (want != got).nonzero()[:, 0]
        self.elements += len(got)
        self.equal += len(got) - len(off)
        self.unjudged += int(rad.isinf().sum())
        excess = self._excess(got[off], mid[off], rad[off])
        most, peak = torch.stack((excess.amax(), excess.argmax().double())).tolist() if len(off) else (0.0, 0)
        if self.worst is None or most > self.excess:
            place = int(off[int(peak)]) if most else 0
            first, *rest = unravel(place, shape)
            values = torch.stack([tensor[place] for tensor in (got, mid, rad)]).tolist()
            self.excess, self.worst = most, Worst(self.locate((first + start, *rest)), *values)
        self._count_codes(got[off], want[off], rad[off], excess)
        self._count_allowed(mid, rad)
        self._sum(got, mid, rad, None if terms is None else terms.flatten())

    def _excess(self, got: Tensor, mid: Tensor, rad: Tensor) -> Tensor:
        """Excess of elements that are not the rounded exact value; it is 0 for all others."""
        distance = distance_off(self.format, mid, got)
        return excess_of(distance, rad).masked_fill_((rad == 0) & (distance == 0), torch.inf)

    def _count_codes(self, got: Tensor, want: Tensor, rad: Tensor, excess: Tensor) -> None:
        """Most codes between elements and their rounded exact values, and between those that pass."""
        if not len(got):
            return
        apart = (ordinal(self.format, got) - ordinal(self.format, want)).abs_()
        apart.masked_fill_(~(got.isfinite() & rad.isfinite()), 0)
        most, passing_most = torch.stack((apart.amax(), torch.where(excess <= 1, apart, 0).amax())).tolist()
        self.code_distance = max(self.code_distance, most)
        self.code_allowed = max(self.code_allowed, passing_most)

    def _count_allowed(self, mid: Tensor, rad: Tensor) -> None:
        """Most codes the bounds let pass, over every SAMPLED-th element."""
        mid, rad = mid[::SAMPLED], rad[::SAMPLED]
        low, high = nearest(self.format, mid - rad), nearest(self.format, mid + rad)
        apart = ordinal(self.format, high) - ordinal(self.format, low)
        self.code_allowed = max(self.code_allowed, int(apart.masked_fill_(rad.isinf(), 0).amax()))

    def _sum(self, got: Tensor, mid: Tensor, rad: Tensor, terms: Tensor | None) -> None:
        judged = rad.isfinite() & got.isfinite()
        if not bool(judged.all()):
            got, rad, mid = got[judged], rad[judged], mid[judged]
            terms = terms[judged] if terms is not None else None
        if not len(got):
            return
        error = (got - mid).abs_()
        # The bound of an element's error is its radius and half a step of the format it is stored in.
        allowed = rad + FORMATS[self.format].step(mid.abs() + rad) / 2
        sums = [error @ error, mid @ mid, allowed @ allowed, error.amax()]
        if terms is not None:
            unit = terms.clamp(min=torch.finfo(torch.float64).tiny)
            nothing = terms <= 0
            sums += [terms @ terms, *(part.div(unit).masked_fill_(nothing, 0.0).amax() for part in (error, allowed))]
        error_square, size_square, allowed_square, largest_error, *over_terms = torch.stack(sums).tolist()
        self.error_square += error_square
        self.size_square += size_square
        self.allowed_square += allowed_square
        self.largest_error = max(self.largest_error, largest_error)
        if over_terms:
            self.terms_square += over_terms[0]
            self.deviation = max(self.deviation, over_terms[1])
            self.deviation_allowed = max(self.deviation_allowed, over_terms[2])

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
