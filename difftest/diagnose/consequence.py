"""What a fault costs: score error, lost recall, attention error. The quantities that `blame` tries to restore."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..reference.indexer import score_magnitude_layer
from ..selection import value_recall
from ..stages import StageName
from .substitute import Mixture, Stages

ConsequenceName = Literal["score", "selection", "attention"]


@dataclass(frozen=True)
class Consequence:
    """A stage whose output is looked at, and the unit of what it loses.

    power   losses are this power of the unit: squares for error norms, since independent errors add as squares.
    """

    name: ConsequenceName
    stage: StageName
    unit: str
    power: int = 1

    def shown(self, loss: float) -> float:
        """A loss in its unit."""
        return float(max(loss, 0.0) ** (1 / self.power))


CONSEQUENCES: dict[ConsequenceName, Consequence] = {
    "score": Consequence("score", "score", "score error, norm over norm of sum|terms|", 2),
    "selection": Consequence("selection", "topk", "recall lost, ties at the cut counted as hits"),
    "attention": Consequence("attention", "attention", "attention error, norm over norm", 2),
}


class Harm:
    """Measures mixtures against the other path alone, each (consequence, replaced stages) once."""

    def __init__(self, mixture: Mixture) -> None:
        self.mixture, self.inputs = mixture, mixture.inputs
        self._other = mixture.other.trace
        self._terms: float | None = None

    def names(self) -> list[ConsequenceName]:
        """Consequences this layer has: a selection only if some row had to select."""
        if self.inputs.kind != "csa":
            return ["attention"]
        exercised = bool((self.inputs.visible > self.inputs.config.index_topk).any())
        return ["score", *(["selection"] if exercised else []), "attention"]  # type: ignore[list-item]

    def of(self, name: ConsequenceName, replaced: Stages) -> float:
        """How much worse than the other path the mixture is, in the unit to the consequence's power."""
        measure = {"score": self._score, "selection": self._selection, "attention": self._attention}[name]
        return float(measure(replaced) ** CONSEQUENCES[name].power)

    def _score(self, replaced: Stages) -> float:
        want, visible = self._other.value("score"), self.inputs.visible
        shown = torch.arange(want.shape[1], device=want.device) < visible[:, None]
        if self._terms is None:
            reads = (self._other.value(stage) for stage in ("index_q", "index_k", "head_weight"))
            self._terms = float(score_magnitude_layer(self.inputs, *reads)[shown].norm())
        got = self.mixture.value("score", replaced)
        if got.shape != want.shape:
            return 1.0
        return _norm_of_change(got[shown], want[shown]) / self._terms if self._terms else 0.0

    def _selection(self, replaced: Stages) -> float:
        visible, score = self.inputs.visible, self._other.value("score")
        rows = visible > self.inputs.config.index_topk
        chosen = self.mixture.value("topk", replaced)[rows]
        return 1.0 - float(value_recall(chosen, score[rows], visible[rows]).mean())

    def _attention(self, replaced: Stages) -> float:
        want = self._other.value("attention")
        size = float(want.double().norm())
        return _norm_of_change(self.mixture.value("attention", replaced), want) / size if size else 0.0


def _norm_of_change(got: Tensor, want: Tensor) -> float:
    """Norm of the difference; what is not finite counts as 0, so that it is as wrong as the value it should have."""
    return float((got.double().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0) - want.double()).norm())
