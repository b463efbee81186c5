"""Delta debugging: the smallest sets of switches that decide an outcome, and how switches depend on one another."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Outcome = Literal["fails", "passes", "other"]
"""What a trial showed. `other`: neither the failure that is looked for nor a pass (another failure, or unjudged)."""

Test = Callable[[frozenset[str]], Outcome]
"""Outcome with exactly these switches on."""

Direction = Literal["cause", "cure"]

MOST_SETS = 4
"""Different minimal sets that are looked for."""


def ddmin(start: Sequence[str], holds: Callable[[frozenset[str]], bool]) -> list[str]:
    """A 1-minimal subset of `start` for which `holds`: without any one of its members it does not.

    Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing Input" (2002), algorithm ddmin. `start` holds.
    """
    found, pieces = list(start), 2
    while len(found) >= 2:
        size = -(-len(found) // pieces)
        parts = [found[at : at + size] for at in range(0, len(found), size)]
        rests = [[item for item in found if item not in part] for part in parts]
        part = next((part for part in parts if holds(frozenset(part))), None)
        rest = next((rest for rest in rests if rest and holds(frozenset(rest))), None) if part is None else None
        if part is not None:
            found, pieces = part, 2
        elif rest is not None:
            found, pieces = rest, max(pieces - 1, 2)
        elif pieces >= len(found):
            break
        else:
            pieces = min(2 * pieces, len(found))
    return found


@dataclass(frozen=True)
class Decided:
    """What switches decide.

    direction   cause: off it passes, on it fails. cure: off it fails, on it passes. None: they decide nothing.
    none, every outcomes with no switch on and with all on.
    sets        minimal sets: with exactly these on, the outcome is that of all on.
    alone       outcome with this switch alone on.   without   with all on but this one.
    """

    direction: Direction | None
    none: Outcome
    every: Outcome
    sets: tuple[tuple[str, ...], ...]
    alone: dict[str, Outcome]
    without: dict[str, Outcome]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "sets": [list(group) for group in self.sets], "says": self.sentences()}

    def sentences(self) -> list[str]:
        """The minimal sets and their interactions in words."""
        if self.direction is None:
            return [f"{self.none} with every switch off and {self.every} with all on: the switches do not decide it"]
        verb = "fails" if self.direction == "cause" else "passes"
        lines = []
        for group in self.sets:
            joined = " + ".join(group)
            together = f" (interaction: only together; {', '.join(group)} alone do not)" if len(group) > 1 else ""
            lines.append(f"{verb} with {joined}{together}")
        if len(self.sets) > 1:
            lines.append(f"interaction: any one of these {len(self.sets)} sets is enough")
        for name in self.alone:
            if all(name not in group for group in self.sets) and self.without[name] != self.every:
                lines.append(f"interaction: {name} undoes another: with all on but it, the case {self.without[name]}")
        return lines


def decide(names: Sequence[str], test: Test) -> Decided:
    """Which switches decide between passing and failing. Each set is tried once."""
    known: dict[frozenset[str], Outcome] = {}

    def tried(on: frozenset[str]) -> Outcome:
        if on not in known:
            known[on] = test(on)
        return known[on]

    none, every = tried(frozenset()), tried(frozenset(names))
    alone = {name: tried(frozenset({name})) for name in names}
    without = {name: tried(frozenset(names) - {name}) for name in names}
    direction: Direction | None = None
    if {none, every} == {"passes", "fails"}:
        direction = "cause" if every == "fails" else "cure"
    sets = _sets(names, lambda on: tried(on) == every) if direction else ()
    return Decided(direction, none, every, sets, alone, without)


def _sets(names: Sequence[str], holds: Callable[[frozenset[str]], bool]) -> tuple[tuple[str, ...], ...]:
    """Minimal sets; after each, the search starts again without one of its members, where that still holds."""
    found: list[tuple[str, ...]] = []
    starts = [list(names)]
    seen: set[frozenset[str]] = set()
    while starts and len(found) < MOST_SETS:
        start = starts.pop(0)
        if frozenset(start) in seen or not holds(frozenset(start)):
            continue
        seen.add(frozenset(start))
        group = tuple(ddmin(start, holds))
        if group not in found:
            found.append(group)
        starts += [[name for name in start if name != member] for member in group]
    return tuple(sorted(found, key=lambda group: (len(group), group)))
