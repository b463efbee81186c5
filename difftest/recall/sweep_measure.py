"""Runs variants on a world and measures every needle: selected or not, rank, margin, and what its loss costs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from ..certify import epsilon
from ..paths.base import Declaration, Path
from ..paths.oracle import Oracle
from ..trace import Trace
from .sweep_attention import NeedleCost, change, needle_cost, outputs
from .sweep_cell import Cell, Score
from .sweep_world import World, with_topk
from .variants import INDEX_STAGES, Variant


@dataclass
class Exact:
    """The oracle on one world, for one k: what every variant is compared with.

    trace    the oracle's trace, up to its selection.   others [R]: the entry at the cut, which the needle has to beat;
    cost, output  of losing the needle, and of the exact selection.
    """

    world: World
    trace: Trace
    others: Tensor
    cost: NeedleCost
    output: Tensor
    _margins: dict[Declaration, list[float | None]] = field(default_factory=dict)

    @property
    def k(self) -> int:
        return self.world.inputs.config.index_topk

    def margins(self, declares: Declaration) -> list[float | None]:
        """Exact score of each needle above the cut, over eps(needle) + eps(cut) of the declared formats.

        The needle is selected iff it beats the k-th best of the other entries; a margin of 1 or more means that the
        declared roundings cannot lose it. None for a row that sees at most k entries: nothing competes there.
        """
        if declares not in self._margins:
            self._margins[declares] = self._all_margins(declares)
        return self._margins[declares]

    def _all_margins(self, declares: Declaration) -> list[float | None]:
        inputs = self.world.inputs
        rows = (inputs.visible > self.k).nonzero()[:, 0]
        pair = torch.stack((self.world.entry[rows], self.others[rows]), 1)
        width = epsilon(inputs, rows, pair, self.trace, declares).total.sum(1)
        needle, cut = self.trace.value("score")[rows].gather(1, pair).double().unbind(1)
        unbounded = torch.where(needle > cut, torch.inf, -torch.inf)
        margin = torch.where(width > 0, (needle - cut) / width, unbounded)
        found: list[float | None] = [None] * len(inputs.visible)
        for row, value in zip(rows.tolist(), margin.tolist(), strict=True):
            found[row] = value
        return found

    @cached_property
    def spread(self) -> list[float]:
        """Exact score of each needle above the cut in standard deviations of the row's scores."""
        score = self.trace.value("score").double()
        gap = score.gather(1, self.world.entry[:, None]) - score.gather(1, self.others[:, None])
        rows = zip(score, self.world.inputs.visible.tolist(), strict=True)
        return (gap[:, 0] / torch.stack([row[:visible].std() for row, visible in rows])).tolist()


def measure_exact(world: World, ks: Sequence[int]) -> list[Exact]:
    """The oracle's trace and needle costs for every k; scores are made once."""
    oracle = Oracle()
    first = run_scores(oracle, world)
    found = []
    for k in ks:
        at_k = with_topk(world, k)
        trace = _again(first)
        trace.stages["topk"] = oracle.stage("topk", at_k.inputs, trace)
        others = _cut_entry(trace.value("score"), world, k)
        cost, output = needle_cost(at_k, trace.value("topk"))
        found.append(Exact(at_k, trace, others, cost, output))
    return found


def run_scores(path: Path, world: World) -> Trace:
    """A path's stages up to the scores."""
    trace = Trace(world.spec.id, world.spec.layer, path.name)
    for stage in INDEX_STAGES[:-1]:
        trace.stages[stage] = path.stage(stage, world.inputs, trace)
    return trace


def _again(trace: Trace) -> Trace:
    """The same stages in a trace of its own."""
    return Trace(trace.case, trace.layer, trace.path, dict(trace.stages))


def _cut_entry(score: Tensor, world: World, k: int) -> Tensor:
    """The k-th best entry of each row that is not its needle, [R]; the worst one where there are fewer."""
    others = score.double().scatter(1, world.entry[:, None], -torch.inf)
    ranked = others.topk(min(k, others.shape[1]), dim=1).indices
    last = (world.inputs.visible - 2).clamp(0, ranked.shape[1] - 1)
    return ranked.gather(1, last[:, None])[:, 0]


def measure(world: World, exacts: Sequence[Exact], variant: Variant) -> list[Cell]:
    """One cell a row and k. A variant that raises gives cells that say so instead of ending the sweep."""
    try:
        path = variant.make()
        trace = _again(exacts[0].trace) if isinstance(path, Oracle) else run_scores(path, world)
    except Exception as error:
        return [cell for exact in exacts for cell in _failed(exact, variant, error)]
    cells: list[Cell] = []
    for exact in exacts:
        try:
            trace.stages["topk"] = path.stage("topk", exact.world.inputs, trace)
            cells += list(_cells(exact, trace, variant, path.declares))
        except Exception as error:
            cells += _failed(exact, variant, error)
    return cells


def _cells(exact: Exact, trace: Trace, variant: Variant, declares: Declaration) -> Iterator[Cell]:
    world, score, chosen = exact.world, trace.value("score"), trace.value("topk")
    entry = world.entry[:, None]
    inside = torch.arange(score.shape[1], device=score.device) < world.inputs.visible[:, None]
    own = score.gather(1, entry)
    rank = torch.where(own[:, 0].isnan(), 0, 1 + ((score > own) & inside).sum(1)).tolist()
    selected = (chosen == entry).any(1).tolist()
    moved = _moved(exact, chosen).tolist()
    margins, spread = exact.margins(declares), exact.spread
    mass, mass_all, loss = exact.cost.mass.tolist(), exact.cost.mass_all.tolist(), exact.cost.output.tolist()
    entries, visible = world.entry.tolist(), world.inputs.visible.tolist()
    for row, (length, depth) in enumerate(world.cells):
        yield Cell(
            distractor=world.spec.distractor,
            layer=world.spec.layer,
            seed=world.spec.seed,
            variant=variant.name,
            group=variant.group,
            k=exact.k,
            length=length,
            depth=depth,
            entry=entries[row],
            visible=visible[row],
            result=Score(
                selected=selected[row],
                rank=rank[row] or None,
                margin=margins[row],
                spread=spread[row],
                mass=mass[row],
                mass_all=mass_all[row],
                loss=loss[row],
                moved=moved[row],
            ),
        )


def _moved(exact: Exact, chosen: Tensor) -> Tensor:
    """Relative change of the output by the selection, [R]. Rows that hold the exact selection's set are 0 unasked."""
    world, wanted = exact.world, exact.trace.value("topk")
    valid = _valid(chosen, world)
    differ = (valid.long().sort(1).values != wanted.long().sort(1).values).any(1).nonzero()[:, 0]
    moved = torch.zeros(len(chosen), device=chosen.device)
    if len(differ):
        moved[differ] = change(outputs(world, valid, differ)[0], exact.output[differ])
    return moved


def _valid(chosen: Tensor, world: World) -> Tensor:
    """The selection with entries the row does not see left out, so that a broken one can still be attended to."""
    return torch.where((chosen >= 0) & (chosen < world.inputs.visible[:, None]), chosen, -1)


def _failed(exact: Exact, variant: Variant, error: Exception) -> list[Cell]:
    """Cells without a result, and why."""
    world, text = exact.world, str(error).strip() or type(error).__name__
    what = "out of memory" if isinstance(error, MemoryError | torch.OutOfMemoryError) else type(error).__name__
    why = f"{what}: {text.splitlines()[0]}"
    entry, visible = world.entry.tolist(), world.inputs.visible.tolist()
    where = (world.spec.distractor, world.spec.layer, world.spec.seed, variant.name, variant.group, exact.k)
    return [
        Cell(*where, length, depth, entry[row], visible[row], None, why)
        for row, (length, depth) in enumerate(world.cells)
    ]
