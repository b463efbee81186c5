"""From a failing case to the smallest layer that fails the same way, and the nearest one that passes."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ..capture import input_tensors
from ..paths.base import Path
from ..reference.inputs import LayerInputs
from ..verdict import Policy
from .reductions import AXES, SIZES, Axis, Impossible, Kept, Size, cut_tails, plain_pages
from .signature import Examined, Signature, examine
from .simplify import float_tensors, whole_tensors, zeroed

SECONDS = 90.0
"""Time a search may take unless told; with the runs before and after it, a command stays within two minutes."""

REPEATS = 5
LEAST_REPEATS = 3
"""Runs of the case as it is before anything is shrunk: a failure that is always the same, or flaky."""

FLAKY_RUNS = 20
"""Runs from which the rate of a flaky failure is told."""

STEADY_SHARE = 0.15
"""Share of the time that those runs may take in all."""

PIECES = 64
"""Most pieces of one size that are taken away one by one."""

ROUNDS = 6
"""Most passes over everything; the last one only confirms that nothing can go."""


class NothingToShrink(Exception):
    """The case passes, or no stage is at fault. The message says which; `exit_code` is the case's."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Flaky(Exception):
    """The failure does not always appear: a smaller case could not be told from a lucky one."""


class OutOfTime(Exception):
    """The search stops where it is."""


@dataclass(frozen=True)
class Progress:
    """How far a search is; handed to `on_progress` after every try."""

    doing: str
    tries: int
    seconds: float
    size: dict[str, int]


@dataclass(frozen=True)
class Neighbour:
    """A layer that passes, `distance` values away from the smallest failing one, by one change."""

    inputs: LayerInputs
    change: str
    distance: int


@dataclass(frozen=True)
class Shrunk:
    """The smallest layer that fails the same way.

    original, smallest   what was examined first and last; their signatures are equal.
    neighbour            the nearest layer that passes, if one was met.
    finished             whether nothing further could go; False when time ran out or the user interrupted before.
    """

    original: Examined
    smallest: Examined
    neighbour: Neighbour | None
    tries: int
    seconds: float
    finished: bool

    @property
    def signature(self) -> Signature:
        assert self.smallest.signature is not None
        return self.smallest.signature


def sizes(inputs: LayerInputs) -> dict[str, int]:
    """How many there are of everything that can be fewer, by name; what this kind of layer has none of is left out."""
    counted = {axis.name: axis.size(inputs) for axis in AXES} | {size.name: size.now(inputs) for size in SIZES}
    found = {"requests": len(inputs.lengths), "tokens": sum(inputs.lengths), **counted}
    found["values"] = sum(int((tensor != 0).sum()) for tensor in float_tensors(inputs).values())
    return {name: count for name, count in found.items() if count}


def shrink(
    path: Path,
    inputs: LayerInputs,
    case: str,
    policy: Policy,
    *,
    seconds: float = SECONDS,
    device: str = "cpu",
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> Shrunk:
    """Shrinks `inputs` (CPU tensors) as far as `path` still fails with the same signature under `policy`.

    seconds   after which the search stops with the smallest layer so far, as it does on an interrupt.

    Raises NothingToShrink for a case that passes or cannot be judged, Flaky for one that fails now and then, before or
    after the search.
    """
    started = time.monotonic()

    def run(tried: LayerInputs, wanted: Signature | None = None) -> Examined:
        return examine(path, tried, case, policy, wanted, device)

    original = _steady(lambda: run(inputs), seconds * STEADY_SHARE)
    signature = original.signature
    if signature is None:
        raise NothingToShrink(*_nothing(original))
    search = _Search(lambda tried: run(tried, signature), original, started, started + seconds, on_progress)
    finished = search.run()
    smallest = _steady(lambda: run(search.current.inputs, signature), seconds * STEADY_SHARE)
    if smallest.signature != signature:
        raise Flaky(f"the smallest case no longer fails with {signature.words()}, which it did when it was found")
    return Shrunk(original, smallest, search.neighbour, search.tries, time.monotonic() - started, finished)


def _nothing(seen: Examined) -> tuple[str, int]:
    verdict = seen.verdict
    if verdict.answer == "agrees":
        return f"nothing to shrink: {verdict}", verdict.exit_code
    if verdict.answer == "explained":
        return f"nothing to shrink, no stage is wrong: {verdict}", verdict.exit_code
    return f"nothing to shrink by: {verdict}", verdict.exit_code


def _steady(run: Callable[[], Examined], seconds: float) -> Examined:
    """What REPEATS runs agree on (LEAST_REPEATS when they take long). Flaky with the observed rate otherwise."""
    started = time.monotonic()
    runs = [run() for _ in range(LEAST_REPEATS)]
    while len(runs) < REPEATS and time.monotonic() - started < seconds:
        runs.append(run())
    first = runs[0]
    if all(seen.signature == first.signature for seen in runs):
        return first
    while len(runs) < FLAKY_RUNS and time.monotonic() - started < 2 * seconds:
        runs.append(run())
    failed = [seen.signature for seen in runs if seen.signature is not None]
    most = max(failed, key=failed.count)
    other = f", {len(failed) - failed.count(most)} times otherwise" if failed.count(most) < len(failed) else ""
    raise Flaky(f"flaky: on equal inputs {failed.count(most)} of {len(runs)} runs failed with {most.words()}{other}")


@dataclass
class _Search:
    """Tries smaller and simpler layers, and keeps those that still fail the same way."""

    examine: Callable[[LayerInputs], Examined]
    current: Examined
    started: float
    deadline: float
    on_progress: Callable[[Progress], None]
    neighbour: Neighbour | None = None
    tries: int = 0
    accepted: int = 0
    doing: str = ""
    _stale: bool = field(default=True, init=False)
    _size_now: dict[str, int] = field(default_factory=dict, init=False)

    def run(self) -> bool:
        """Whether nothing further can go; False when time ran out or the user interrupted."""
        try:
            for _ in range(ROUNDS):
                before = self.accepted
                self._structure()
                self._values()
                if self.accepted == before:
                    return True
        except (OutOfTime, KeyboardInterrupt):
            pass
        return False

    @property
    def inputs(self) -> LayerInputs:
        return self.current.inputs

    def attempt(self, change: str, make: Callable[..., LayerInputs], *arguments: Any) -> bool:
        """Whether the layer `make(*arguments)` fails the same way, and is the current one from now on."""
        if time.monotonic() > self.deadline:
            raise OutOfTime
        try:
            candidate = make(*arguments)
            seen = self.examine(candidate)
        except (Impossible, RuntimeError, IndexError, ValueError):
            return False  # no such layer, or one for which the judge has no bound
        finally:
            self.tries += 1
            self._report()
        if seen.signature == self.current.signature:
            self.current, self._stale, self._size_now = seen, True, {}
            self.accepted += 1
            return True
        if seen.passes:
            self._meet(candidate, change)
        return False

    def _meet(self, passing: LayerInputs, change: str) -> None:
        distance = _distance(self.inputs, passing)
        if self._stale or self.neighbour is None or distance < self.neighbour.distance:
            self.neighbour, self._stale = Neighbour(passing, change, distance), False

    def _report(self) -> None:
        self._size_now = self._size_now or sizes(self.inputs)
        self.on_progress(Progress(self.doing, self.tries, time.monotonic() - self.started, self._size_now))

    def _structure(self) -> None:
        by_name: dict[str, Axis | Size] = {axis.name: axis for axis in AXES}
        by_name |= {size.name: size for size in SIZES}
        assert self.current.signature is not None
        fixed = DIMS if self.current.signature.rule in ABOUT_SHAPES else ()
        for name in ORDER:
            self.doing, item = name, by_name[name]
            if isinstance(item, Axis):
                self._along(item)
            elif name not in fixed:
                self._size(item)
        self.doing = "tails and pages"
        if not _same(cut_tails, self.inputs):
            self.attempt("tokens behind the last entry left out", cut_tails, self.inputs)
        for first in (0, 1):
            plain = plain_pages(self.inputs, first)
            if plain.num_pages < self.inputs.num_pages and self.attempt(
                "pages in order", plain_pages, self.inputs, first
            ):
                break

    def _along(self, axis: Axis) -> None:
        count = axis.size(self.inputs)
        for kept in smallest_sets(count, self._focus(axis.name)):
            if self._keep(axis, kept):
                break
        piece = axis.size(self.inputs) // 2
        while piece and axis.size(self.inputs) // piece <= PIECES:
            start = 0
            while start < (count := axis.size(self.inputs)) and count > 1:
                kept = [*range(start), *range(start + piece, count)]
                if not kept or not self._keep(axis, kept):
                    start += piece
            piece //= 2

    def _keep(self, axis: Axis, kept: Kept) -> bool:
        inputs = self.inputs
        gone = [place for place in range(axis.size(inputs)) if place not in set(kept)]
        shown = ", ".join(map(str, gone[:4])) + (", ..." if len(gone) > 4 else "")
        return self.attempt(f"without {axis.name} {shown}", axis.keep, inputs, kept)

    def _size(self, size: Size) -> None:
        inputs = self.inputs
        if not size.now(inputs):
            return
        for choice in size.choices(inputs):
            if self.attempt(f"{size.name} {choice}", size.make, inputs, choice):
                return

    def _focus(self, axis: str) -> int | None:
        """Number of the request, row, entry or head that fails most, where the record names one."""
        where, inputs = self.current.where, self.inputs
        row = where.get("row")
        request = where.get("request", int(inputs.row_request[row]) if row is not None else None)
        if axis == "requests":
            return request
        if axis == "rows":
            return row if row is not None else self._row_that_sees(request)
        if axis == "entries" and "entry" in where and request is not None:
            return inputs.entry_offset[request] + min(where["entry"], inputs.entries[request] - 1)
        heads = {"index_q": "index heads", "head_weight": "index heads", "attention": "attention heads"}
        return where.get("head") if axis == heads.get(self.current.verdict.stage or "") else None

    def _row_that_sees(self, request: int | None) -> int | None:
        """The last row of a request."""
        rows = [row for row, owner in enumerate(self.inputs.row_request.tolist()) if owner == request]
        return rows[-1] if rows else None

    def _values(self) -> None:
        for name in float_tensors(self.inputs):
            self.doing = f"values of {name}"
            for simpler in whole_tensors(self.inputs, name):
                if self.attempt(f"{name}: {simpler.words}", _as_it_is, simpler.inputs):
                    break
        for name, tensor in float_tensors(self.inputs).items():
            self.doing = f"values of {name}"
            for axis, count in enumerate(tensor.shape):
                self._zero(name, axis, count)

    def _zero(self, name: str, axis: int, count: int) -> None:
        """Sets as many rows, columns, ... of a tensor to their constant as can be."""
        piece = count // 2
        while piece and count // piece <= PIECES:
            for start in range(0, count, piece):
                places = list(range(start, min(start + piece, count)))
                simpler = zeroed(self.inputs, name, axis, places)
                if simpler:
                    change = f"{name}: {len(places)} of {count} along axis {axis} constant"
                    self.attempt(change, _as_it_is, simpler.inputs)
            piece //= 2


DIMS = ("index dims", "head dims")
ABOUT_SHAPES = ("crash", "shape")
"""Rules that a path may break with any number of dims but the model's: fewer of them would be another failure."""

ORDER = (
    "requests",
    "rows",
    "selected entries (k)",
    "entries",
    "index heads",
    "attention heads",
    "window",
    "steps",
    *DIMS,
)
"""What shrinks most comes first; k before entries, since a row must see more entries than it selects."""


def smallest_sets(count: int, focus: int | None) -> Iterator[list[int]]:
    """Sets of neighbours out of `count` to keep, smallest first, sizes doubling: those that end with `focus`, begin
    with it, or stand at an end. Last, everything up to `focus`, which keeps the places of what stays."""
    seen: set[tuple[int, int]] = set()
    size = 1
    while size < count:
        starts = [0, count - size] if focus is None else [focus - size + 1, focus, 0, count - size]
        for start in (min(max(0, start), count - size) for start in starts):
            if (start, size) not in seen:
                seen.add((start, size))
                yield list(range(start, start + size))
        size *= 2
    if focus is not None and focus + 1 < count:
        yield list(range(focus + 1))


def _as_it_is(inputs: LayerInputs) -> LayerInputs:
    return inputs


def _same(reduce: Callable[[LayerInputs], LayerInputs], inputs: LayerInputs) -> bool:
    return reduce(inputs).lengths == inputs.lengths


def _distance(here: LayerInputs, there: LayerInputs) -> int:
    """Numbers that differ between two layers: changed, missing or new ones; at least 1."""
    ours, theirs = input_tensors(here), input_tensors(there)
    total = 0
    for name in ours.keys() | theirs.keys():
        a, b = ours.get(name), theirs.get(name)
        if a is None or b is None or a.shape != b.shape:
            total += abs((0 if a is None else a.numel()) - (0 if b is None else b.numel())) or 1
        else:
            total += int((a != b).sum())
    return max(1, total)
