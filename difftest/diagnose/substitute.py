"""A layer in which some stages are computed by another path: every mixture of two paths, each stage made once."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..paths.base import CannotFeed, Path, get_path
from ..reference.inputs import LayerInputs
from ..selection import as_mask
from ..stages import STAGES, StageName, stages_of
from ..trace import StageTensors, Trace

Stages = frozenset[StageName]
NOTHING: Stages = frozenset()


def reads(stage: StageName, kind: str) -> tuple[StageName, ...]:
    """Upstream stages of `stage` that a layer of `kind` has."""
    return tuple(name for name in STAGES[stage].reads if name in stages_of(kind))


def upstream(stage: StageName, kind: str) -> Stages:
    """`stage` and everything it depends on."""
    found = {stage}
    for name in reads(stage, kind):
        found |= upstream(name, kind)
    return frozenset(found)


@dataclass
class Side:
    """One path of a mixture: its whole trace, and the path itself where it can compute a stage from other tensors."""

    trace: Trace
    path: Path | None = None


@dataclass
class Mixture:
    """Stages of `own`, except that a chosen set of stages is computed by `other`, from what the mixture has upstream.

    A stage that cannot be computed from such tensors (a kernel that reads one format, a saved trace) is carried: the
    exact stage on the new tensors, plus what its path deviated from the exact stage on its own ones. For a selection
    that is the exact selection with the same entries dropped and added. `carried` names these stages.
    """

    inputs: LayerInputs
    own: Side
    other: Side
    carried: set[StageName] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._exact = get_path("oracle")
        self._made: dict[tuple[StageName, Stages], StageTensors] = {}

    @property
    def stages(self) -> list[StageName]:
        return stages_of(self.inputs.kind)

    def tensors(self, stage: StageName, replaced: Stages) -> StageTensors:
        """One stage of the mixture in which `replaced` stages are the other path's."""
        key = stage, replaced & upstream(stage, self.inputs.kind)
        if key not in self._made:
            self._made[key] = self._make(stage, key[1])
        return self._made[key]

    def value(self, stage: StageName, replaced: Stages) -> Tensor:
        """The main tensor of `tensors`."""
        return self.tensors(stage, replaced)["value"]

    def _make(self, stage: StageName, replaced: Stages) -> StageTensors:
        side = self.other if stage in replaced else self.own
        names = reads(stage, self.inputs.kind)
        parts = {name: self.tensors(name, replaced) for name in names}
        if all(same(parts[name], side.trace[name]) for name in names):
            return side.trace[stage]
        trace = Trace(side.trace.case, side.trace.layer, side.trace.path, dict(parts))
        if side.path is not None:
            try:
                return side.path.stage(stage, self.inputs, trace)
            except CannotFeed:
                pass
        self.carried.add(stage)
        return self._carry(stage, side, trace)

    def _carry(self, stage: StageName, side: Side, trace: Trace) -> StageTensors:
        """The exact stage on new tensors with the side's own deviation on top."""
        before = self._exact.stage(stage, self.inputs, side.trace)
        after = self._exact.stage(stage, self.inputs, trace)
        if stage == "topk":
            width = int(self.inputs.visible.max())
            return {"value": same_swaps(side.trace[stage]["value"], before["value"], after["value"], width)}
        return {name: deviate(side.trace[stage][name], before[name], after[name]) for name in STAGES[stage].tensors}


def same(one: StageTensors, two: StageTensors) -> bool:
    """Whether two stages are the same object, or hold the same main tensors bit for bit."""
    if one is two:
        return True
    names = [name for name in ("value", "window", "compressed") if name in one and name in two]
    return all(one[name].shape == two[name].shape and torch.equal(one[name], two[name]) for name in names)


def deviate(got: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """after + (got - before), where both are finite; `after` elsewhere."""
    moved = got.float() - before.float()
    return after + torch.where(moved.isfinite(), moved, 0.0).to(after.dtype)


def same_swaps(got: Tensor, before: Tensor, after: Tensor, width: int) -> Tensor:
    """`after` [R, k] without the entries that `got` leaves out of `before`, and with those it adds; -1 padded.

    Where a swap cannot be made again (the entry left out is not in `after`), room is kept at k by dropping from the
    end of what was added.
    """
    mine, exact, new = (as_mask(part, width) for part in (got, before, after))
    kept = (new & ~(exact & ~mine)) | (mine & ~exact)
    out = torch.full_like(after, -1)
    k = after.shape[1]
    for row, mask in enumerate(kept):
        entries = mask.nonzero()[:k, 0]
        out[row, : len(entries)] = entries.to(out.dtype)
    return out
