"""The one mechanism: a mutant wraps one method of a path object while one stage runs."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..cases.case import Case
from ..paths.base import Availability, Declaration, Path
from ..reference.inputs import LayerInputs
from ..stages import StageName
from ..trace import StageTensors, Trace

Block = Callable[..., Any]
"""A building block: a bound method of a path."""

Wrap = Callable[[Any, Block], Block]
"""wrap(path, original) -> what is called instead; `path` is the object that owns the block."""


@dataclass(frozen=True)
class Seed:
    """Where a fault sits in one path: the name of a method, and what is called in its place."""

    block: str
    wrap: Wrap


@dataclass(frozen=True)
class Mutant:
    """One fault. Produced by the lists of this package, consumed by the kill matrix, `blame` and tests.

    name     as `l8-step-visibility`; starts with the report's code in lower case.
    report   code of the public report that it emulates, or of the contract (K) or numerical difference (D) it breaks.
    stage    where it sits; `also`: further stages that have the same fault (both sides of a dot product).
    case     a small case on which it shows.
    seeds    path name -> where it sits in that path.
    stages   path name -> stage, for the paths in which it sits elsewhere.
    says     the fault in a line.
    """

    name: str
    report: str
    stage: StageName
    case: Case
    seeds: Mapping[str, Seed]
    says: str
    also: tuple[StageName, ...] = ()
    stages: Mapping[str, StageName] | None = None

    def stage_in(self, path: str) -> StageName:
        """The (first) stage at fault in `path`."""
        return (self.stages or {}).get(path, self.stage)


@contextmanager
def replaced(owner: Any, block: str, wrap: Wrap) -> Iterator[None]:
    """Calls `wrap(owner, owner.block)` in place of `owner.block` inside the block; the object is whole again after."""
    setattr(owner, block, wrap(owner, getattr(owner, block)))
    try:
        yield
    finally:
        delattr(owner, block)


class Planted(Path):
    """A path with a mutant in it. Every stage but the mutant's is the path's own, untouched.

    The block is looked for on the path itself, else on the sibling that computes its other stages (`Path.sibling`).
    """

    def __init__(self, path: Path, mutant: Mutant) -> None:
        if path.name not in mutant.seeds:
            raise ValueError(f"mutant {mutant.name} has no seed in {path.name}: it has in {', '.join(mutant.seeds)}")
        self.inner, self.mutant = path, mutant
        self.name = f"{path.name}+{mutant.name}"
        self._stages = (mutant.stage_in(path.name), *mutant.also)
        self._seed = mutant.seeds[path.name]

    @property
    def declares(self) -> Declaration:  # type: ignore[override]
        return self.inner.declares

    def availability(self) -> Availability:
        return self.inner.availability()

    def stage(self, stage: StageName, inputs: LayerInputs, trace: Trace) -> StageTensors:
        if stage not in self._stages:
            return self.inner.stage(stage, inputs, trace)
        with replaced(self._owner(inputs), self._seed.block, self._seed.wrap):
            return self.inner.stage(stage, inputs, trace)

    def _owner(self, inputs: LayerInputs) -> Any:
        if hasattr(self.inner, self._seed.block):
            return self.inner
        return self.inner.sibling(inputs)  # type: ignore[attr-defined]
