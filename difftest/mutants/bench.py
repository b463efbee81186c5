"""Runs mutants, and of each only what its fault can change: stages before it are the faultless path's."""

from dataclasses import dataclass, replace

from ..cases.case import Case
from ..cases.generate import generate
from ..isolated import check_isolated
from ..paths.base import Path, get_path
from ..record import Record
from ..reference.inputs import LayerInputs
from ..runner import Result, accumulate, run_path
from ..stages import StageName, stages_of
from ..trace import StageTensors, Trace
from .mutant import Mutant, Planted


@dataclass(frozen=True)
class Comparison:
    """A mutant's result beside the faultless path's and the oracle's trace, all on one case."""

    inputs: LayerInputs
    oracle: Trace
    faultless: Result
    result: Result
    path: Planted

    @property
    def renamed(self) -> list[Record]:
        """Every record of the mutant under its own name, those of untouched stages too."""
        return [replace(record, path=self.path.name) for record in self.result.records]


class Bench:
    """Keeps inputs, oracle traces and faultless results, each made once for a case (and path)."""

    def __init__(self) -> None:
        self._inputs: dict[str, LayerInputs] = {}
        self._oracle: dict[str, Trace] = {}
        self._paths: dict[str, Path] = {}
        self._stages: dict[tuple[str, str], Trace] = {}
        self._faultless: dict[tuple[str, str], Result] = {}

    def path(self, name: str) -> Path:
        """The faultless path object, one for all mutants."""
        if name not in self._paths:
            self._paths[name] = get_path(name)
        return self._paths[name]

    def inputs(self, case: Case) -> LayerInputs:
        """Inputs of the case's first layer."""
        if case.id not in self._inputs:
            self._inputs[case.id] = generate(case, case.layers[0])
        return self._inputs[case.id]

    def oracle(self, case: Case) -> Trace:
        """The oracle's trace of the case's first layer."""
        if case.id not in self._oracle:
            self._oracle[case.id] = get_path("oracle").run(self.inputs(case), case.id)
        return self._oracle[case.id]

    def before(self, mutant: Mutant, path: str) -> dict[StageName, StageTensors]:
        """The faultless path's stages before the one at fault."""
        case, inputs = mutant.case, self.inputs(mutant.case)
        stages = stages_of(inputs.kind)
        trace = self._stages.setdefault((path, case.id), Trace(case.id, inputs.layer, path))
        wanted = stages[: stages.index(mutant.stage_in(path))]
        for stage in wanted:
            if stage not in trace:
                trace.stages[stage] = self.path(path).stage(stage, inputs, trace)
        return {stage: trace[stage] for stage in wanted}

    def faultless(self, path: str, case: Case) -> Result:
        """Trace and all records of the path as it is."""
        if (path, case.id) not in self._faultless:
            inputs = self.inputs(case)
            result = run_path(self.path(path), inputs, case.id)
            accumulate(result, inputs, self.oracle(case), self.path(path))
            self._stages[path, case.id] = result.trace
            self._faultless[path, case.id] = result
        return self._faultless[path, case.id]

    def check_stage(self, mutant: Mutant, path: str) -> Record:
        """The isolated record of the stage at fault alone: all that the verdict needs, since nothing fails before."""
        inputs, planted, stage = self.inputs(mutant.case), Planted(self.path(path), mutant), mutant.stage_in(path)
        trace = Trace(mutant.case.id, inputs.layer, planted.name, self.before(mutant, path))
        trace.stages[stage] = planted.stage(stage, inputs, trace)
        return check_isolated(stage, inputs, trace, planted.declares)

    def compare(self, mutant: Mutant, path: str) -> Comparison:
        """Runs a mutant from its first stage on; records of the stages before it are the faultless ones."""
        inputs, oracle = self.inputs(mutant.case), self.oracle(mutant.case)
        clean, planted = self.faultless(path, mutant.case), Planted(self.path(path), mutant)
        before = self.before(mutant, path)
        given = Trace(mutant.case.id, inputs.layer, planted.name, before)
        result = run_path(planted, inputs, mutant.case.id, given)
        changed = Result(result.trace, [])
        accumulate(changed, inputs, oracle, planted)
        kept = [record for record in clean.records if record.stage in before]
        changed.records = [record for record in changed.records if record.stage not in before]
        result.records = [*kept, *result.records, *changed.records]
        return Comparison(inputs, oracle, clean, result, planted)
