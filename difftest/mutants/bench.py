"""Runs mutants, and of each only what its fault can change: stages before it are the faultless path's."""

from dataclasses import dataclass

from ..cases.case import Case
from ..cases.generate import generate
from ..paths.base import Path, get_path
from ..record import Record
from ..reference.inputs import LayerInputs
from ..runner import Result, accumulate, run_path
from ..stages import stages_of
from ..trace import Trace
from .mutant import Mutant, Planted


@dataclass(frozen=True)
class Comparison:
    """A mutant's result beside the faultless path's and the oracle's trace, all on one case."""

    inputs: LayerInputs
    oracle: Trace
    faultless: Result
    result: Result
    path: Planted


class Bench:
    """Keeps inputs, oracle traces and faultless results, each made once for a case (and path)."""

    def __init__(self) -> None:
        self._inputs: dict[str, tuple[LayerInputs, Trace]] = {}
        self._paths: dict[str, Path] = {}
        self._faultless: dict[tuple[str, str], Result] = {}

    def path(self, name: str) -> Path:
        """The faultless path object, one for all mutants."""
        if name not in self._paths:
            self._paths[name] = get_path(name)
        return self._paths[name]

    def case(self, case: Case) -> tuple[LayerInputs, Trace]:
        """Inputs of the case's first layer and the oracle's trace of them."""
        if case.id not in self._inputs:
            inputs = generate(case, case.layers[0])
            self._inputs[case.id] = inputs, run_path(get_path("oracle"), inputs, case.id).trace
        return self._inputs[case.id]

    def faultless(self, path: str, case: Case) -> Result:
        """Trace and all records of the path as it is."""
        if (path, case.id) not in self._faultless:
            inputs, oracle = self.case(case)
            result = run_path(self.path(path), inputs, case.id)
            accumulate(result, inputs, oracle, self.path(path))
            self._faultless[path, case.id] = result
        return self._faultless[path, case.id]

    def compare(self, mutant: Mutant, path: str) -> Comparison:
        """Runs a mutant from its first stage on; records of the stages before it are the faultless ones."""
        inputs, oracle = self.case(mutant.case)
        clean, planted = self.faultless(path, mutant.case), Planted(self.path(path), mutant)
        stages = stages_of(inputs.kind)
        before = set(stages[: stages.index(mutant.stage_in(path))])
        given = Trace(clean.trace.case, clean.trace.layer, planted.name)
        given.stages = {stage: clean.trace[stage] for stage in stages if stage in before}
        result = run_path(planted, inputs, mutant.case.id, given)
        changed = Result(result.trace, [])
        accumulate(changed, inputs, oracle, planted)
        changed.records = [record for record in changed.records if record.stage not in before]
        kept: list[Record] = [record for record in clean.records if record.stage in before]
        result.records = [*kept, *result.records, *changed.records]
        return Comparison(inputs, oracle, clean, result, planted)
