"""Every mutant by name, and paths with one planted."""

from typing import ClassVar

from ..paths.base import Availability, Declaration, Path, get_path
from ..reference.inputs import LayerInputs
from ..stages import StageName, nearest
from ..trace import StageTensors, Trace
from .attention_faults import ATTENTION_MUTANTS
from .key_faults import KEY_MUTANTS
from .latent_faults import LATENT_MUTANTS
from .mutant import Mutant, Planted
from .pool_faults import POOL_MUTANTS
from .query_faults import QUERY_MUTANTS, WEIGHT_MUTANTS
from .score_faults import SCORE_MUTANTS
from .select_faults import SELECT_MUTANTS

PATHS = ("sglang-fp8-model", "bf16-k")
"""Paths that mutants are planted in."""

NOT_EMULATED = {
    "C4": "the last bits of a sum depend on the batch; inside fp32's bound, and a matter of policy (batch invariance)",
    "T3": "another choice among equal scores; free here, and a matter of policy (determinism)",
    "E3": "a way to bisect (k above every length), not a fault",
    "E4, E5, E6, E7": "no cause is known, or it shows only under load",
}
"""Kinds of public reports without a mutant, and why."""

MUTANTS: tuple[Mutant, ...] = (
    *POOL_MUTANTS,
    *KEY_MUTANTS,
    *QUERY_MUTANTS,
    *WEIGHT_MUTANTS,
    *SCORE_MUTANTS,
    *SELECT_MUTANTS,
    *LATENT_MUTANTS,
    *ATTENTION_MUTANTS,
)


def mutants(path: str = "") -> dict[str, Mutant]:
    """Mutants by name, in stage order; only those with a seed in `path` if one is named."""
    return {mutant.name: mutant for mutant in MUTANTS if not path or path in mutant.seeds}


def find(name: str) -> Mutant:
    """The mutant of this name. ValueError with the nearest names otherwise."""
    known = mutants()
    if name not in known:
        raise ValueError(nearest(name, list(known), "mutant").replace("difftest list mutants", "difftest mutants list"))
    return known[name]


def plant(path: str | Path, mutant: str | Mutant) -> Planted:
    """`path` (a spec or an object of its own) with the mutant in it. ValueError if the mutant has no seed there."""
    return Planted(
        get_path(path) if isinstance(path, str) else path, find(mutant) if isinstance(mutant, str) else mutant
    )


class NamedMutant(Path):
    """`mutant:of=bf16-k,name=l8-step-visibility`: a planted path by its spec."""

    name = "mutant"
    says: ClassVar[str] = "a path with a planted fault: mutant:of=PATH,name=MUTANT; see `difftest mutants list`"

    def __init__(self, of: str = "sglang-fp8-model", name: str = "") -> None:
        self._planted = plant(of, name) if name else None
        if self._planted:
            self.name = f"mutant:of={of},name={name}"

    @property
    def declares(self) -> Declaration:  # type: ignore[override]
        return self._planted.declares if self._planted else Declaration()

    def availability(self) -> Availability:
        if self._planted is None:
            return Availability(False, "no mutant is named", "give mutant:of=PATH,name=MUTANT")
        return self._planted.availability()

    def stage(self, stage: StageName, inputs: LayerInputs, trace: Trace) -> StageTensors:
        if self._planted is None:
            raise ValueError("path mutant needs a mutant: give mutant:of=PATH,name=MUTANT")
        return self._planted.stage(stage, inputs, trace)
