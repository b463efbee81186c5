"""Blame: which stages, computed by the oracle instead, bring the quality back, and is it a bug or a format."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path as Directory
from typing import Any

from ..cases.case import Case
from ..cases.generate import generate
from ..isolated import check_isolated, declared_format
from ..paths.base import Path, get_path
from ..policy import Policy, load_policy
from ..record import Record
from ..reference.inputs import LayerInputs
from ..run_dir import RunDir
from ..runner import Result, accumulate, covers, inputs_fault, run_path
from ..stages import StageName, stages_of
from ..trace import Trace
from ..verdict import Failure, Verdict, failure, judge
from .consequence import CONSEQUENCES, Consequence, ConsequenceName, Harm
from .shares import NOTABLE, SILENT, Shares, share_out
from .substitute import Mixture, Side, upstream

ORACLE = "oracle"
PREFERRED: tuple[ConsequenceName, ...] = ("selection", "attention", "score")
"""Consequences in the order in which a bug's cost is told: the first that the stage at fault has a part in."""

OF_BUDGET: dict[str, ConsequenceName] = {"topk": "selection", "score": "score", "attention": "attention"}


@dataclass(frozen=True)
class Culprit:
    """A stage that is to blame, and how.

    kind   bug: its isolated check fails, `what` is the rule. format: it does what it declares, `what` is the format.
           arithmetic: likewise, and it stores fp32: its sums are the cause, or ties that any arithmetic decides.
    """

    stage: StageName
    kind: str
    what: str
    share: float

    def __str__(self) -> str:
        return f"bug at {self.stage}" if self.kind == "bug" else f"{self.kind} {self.what} at {self.stage}"


@dataclass
class LayerBlame:
    """The answer for one layer.

    failed   stages whose isolated check fails, and how.   formats   what every stage declares to store.
    costs    what each consequence lost and who is to blame for it; empty where nothing could be measured.
    primary  the consequence that the answer is about.   carried  stages whose path could not be fed and was carried.
    """

    case: str
    layer: int
    kind: str
    path: str
    other: str
    verdict: Verdict
    failed: dict[StageName, Failure] = field(default_factory=dict)
    formats: dict[StageName, str] = field(default_factory=dict)
    costs: dict[ConsequenceName, Shares[StageName]] = field(default_factory=dict)
    primary: ConsequenceName | None = None
    carried: tuple[StageName, ...] = ()

    @property
    def nothing(self) -> bool:
        """Whether the layer agrees, so that there is nothing to blame."""
        return self.verdict.answer == "agrees" and not self.failed

    @property
    def shares(self) -> Shares[StageName] | None:
        return self.costs[self.primary] if self.primary else None

    @property
    def loss(self) -> float:
        """The attention error, which every layer has; 0 where it was not measured."""
        return CONSEQUENCES["attention"].shown(self.costs["attention"].loss) if "attention" in self.costs else 0.0

    @property
    def culprits(self) -> list[Culprit]:
        """Stages with a failing check, in stage order; then those of the smallest restoring set that have none.

        Beside a bug, a format with less than a tenth of the loss is left out: its share is in the table.
        """
        shares = self.shares.shapley if self.shares else {}
        found = [Culprit(stage, "bug", fail.rule, shares.get(stage, 0.0)) for stage, fail in self.failed.items()]
        sets = self.shares.smallest if self.shares else []
        rest = [stage for stage in stages_of(self.kind) if sets and stage in sets[0] and stage not in self.failed]
        least = NOTABLE if found else 0.0
        told = [stage for stage in rest if shares[stage] >= least]
        return found + [
            Culprit(stage, _kind(self.formats[stage]), self.formats[stage], shares[stage]) for stage in told
        ]

    @property
    def largest(self) -> tuple[StageName, float] | None:
        """The stage with the largest share of what the answer is about: substitution's own word, checks aside."""
        if not self.shares or not self.shares.shapley:
            return None
        stage = max(self.shares.shapley, key=lambda name: self.shares.shapley[name] if self.shares else 0.0)
        return stage, self.shares.shapley[stage]

    @property
    def answer(self) -> str:
        """The answer in a line."""
        if self.nothing:
            return "nothing to blame"
        if self.verdict.answer == "cannot judge":
            return f"cannot judge: {self.verdict.why}"
        told = " and ".join(map(str, self.culprits))
        if self.verdict.answer == "bug" and not self.failed:
            return f"{self.verdict.headline}, by comparison alone{f'; {told}' if told else ''}"
        return told or self.verdict.headline

    def to_json(self) -> dict[str, Any]:
        return {
            "case": self.case,
            "layer": self.layer,
            "kind": self.kind,
            "path": self.path,
            "baseline": self.other,
            "answer": self.answer,
            "verdict": self.verdict.to_json(),
            "culprits": [
                {"stage": who.stage, "kind": who.kind, "what": who.what, "share": who.share} for who in self.culprits
            ],
            "failed": {stage: fail.why for stage, fail in self.failed.items()},
            "formats": self.formats,
            "primary": self.primary,
            "costs": {name: _shares_json(shares, CONSEQUENCES[name]) for name, shares in self.costs.items()},
            "carried": list(self.carried),
        }


def _kind(format_: str) -> str:
    return "arithmetic" if format_.startswith(("fp32", "fp64", "fp8_wgmma")) else "format"


def _shares_json(shares: Shares[StageName], consequence: Consequence) -> dict[str, Any]:
    return {
        "unit": consequence.unit,
        "power": consequence.power,
        "loss": consequence.shown(shares.loss),
        "alone": shares.alone,
        "last": shares.last,
        "share": shares.shapley,
        "smallest": [sorted(group) for group in shares.smallest],
        "remains": shares.remains,
        "interactions": [{"stages": list(one.players), "share": one.share} for one in shares.interactions],
    }


@dataclass
class Blame:
    """Every layer's answer. Produced by `blame`, consumed by the command and by people."""

    layers: list[LayerBlame]

    @property
    def guilty(self) -> list[LayerBlame]:
        return [layer for layer in self.layers if not layer.nothing and layer.verdict.answer != "cannot judge"]

    @property
    def first(self) -> LayerBlame | None:
        """The lowest layer with something to blame."""
        return min(self.guilty, key=lambda layer: layer.layer, default=None)

    @property
    def most(self) -> LayerBlame | None:
        """The layer with the largest attention error; of equal ones the first."""
        return max(self.guilty, key=lambda layer: (layer.loss, -layer.layer), default=None)

    @property
    def exit_code(self) -> int:
        """1 if some layer disagrees, else 125 if some layer cannot be judged, else 0."""
        codes = {layer.verdict.exit_code for layer in self.layers}
        return 1 if 1 in codes else 125 if 125 in codes or not self.layers else 0

    def to_json(self) -> dict[str, Any]:
        return {
            "exit_code": self.exit_code,
            "first_layer": self.first.layer if self.first else None,
            "worst_layer": self.most.layer if self.most else None,
            "layers": [layer.to_json() for layer in self.layers],
        }


class NotCovered(Exception):
    """A path of recordings holds none of this case."""


def blame(
    case: Case,
    path: str | Path,
    baseline: str | Path = ORACLE,
    *,
    layers: Sequence[int] = (),
    device: str = "cpu",
    policy: str | Policy = "default",
    traces: Directory | None = None,
    captured: dict[int, LayerInputs] | None = None,
    on_layer: Callable[[LayerBlame], None] = lambda _: None,
) -> Blame:
    """Finds the stages to blame on every layer of a case.

    path, baseline  specs, or objects of your own `Path` class; stages are replaced by the baseline's.
    traces          directory of an earlier run: the path's (and, where it is there, the baseline's) tensors are read
                    from it, nothing of the path is run, and stages are carried instead of computed again. Without
                    `layers`, those that were saved.
    captured        inputs by layer, instead of those that the case generates.

    ValueError if a saved trace is missing; NotCovered if the path has nothing to say about any of the layers.
    """
    own, other = (get_path(name) if isinstance(name, str) else name for name in (path, baseline))
    chosen = policy if isinstance(policy, Policy) else load_policy(policy)
    run = RunDir.open(traces) if traces else None
    asked = _layers_of(case, own, run, layers)
    found = []
    for layer in asked:
        inputs = ((captured or {}).get(layer) or generate(case, layer)).to(device)
        found.append(_blame_layer(case.id, inputs, own, other, chosen, run))
        on_layer(found[-1])
    return Blame(found)


def _layers_of(case: Case, own: Path, run: RunDir | None, layers: Sequence[int]) -> list[int]:
    """The layers asked for, or the case's, that the path has anything to say about; of saved traces, those saved."""
    if run:
        if layers:
            return list(layers)
        saved = [layer for layer in case.layers if run.trace_file(case.id, layer, own.name).is_file()]
        return saved or list(case.layers[:1])
    asked = [layer for layer in layers or case.layers if covers(own, case, layer)]
    if not asked:
        raise NotCovered(f"path {own.name} has nothing to say about {case.id}: it holds other recordings")
    return asked


def _blame_layer(
    case: str, inputs: LayerInputs, own: Path, other: Path, policy: Policy, run: RunDir | None
) -> LayerBlame:
    fault = inputs_fault(inputs)
    if fault:
        record = Record(case, inputs.layer, inputs.kind, own.name, "kv", "isolated", ORACLE, skipped=fault)
        return _answer([record], policy, inputs, own, other.name)
    exact = get_path(ORACLE).run(inputs, case)
    result = _saved(run, case, inputs, own) if run else run_path(own, inputs, case)
    accumulate(result, inputs, exact, own)
    found = _answer(result.records, policy, inputs, own, other.name)
    if found.nothing:
        return found
    against = exact if other.name == ORACLE else _trace_of(run, case, inputs, other)
    sides = Side(result.trace, None if run else own), Side(against, other if other.availability().ok else None)
    return weigh(found, Mixture(inputs, *sides))


def blame_result(result: Result, inputs: LayerInputs, exact: Trace, own: Path, policy: Policy) -> LayerBlame:
    """Blame for a result whose accumulated records are made, against the oracle's trace of the same inputs."""
    found = _answer(result.records, policy, inputs, own, ORACLE)
    if found.nothing:
        return found
    return weigh(found, Mixture(inputs, Side(result.trace, own), Side(exact, get_path(ORACLE))))


def weigh(found: LayerBlame, mixture: Mixture) -> LayerBlame:
    """Fills in what each consequence lost, by substitution, and which one the answer is about.

    A path that stopped early has the consequences whose stages it made.
    """
    harm = Harm(mixture)
    for name in harm.names():
        players = [stage for stage in mixture.stages if stage in upstream(CONSEQUENCES[name].stage, found.kind)]
        if any(stage not in mixture.own.trace for stage in players):
            continue
        found.costs[name] = share_out(players, lambda replaced, of=name: harm.of(of, replaced))  # type: ignore[misc]
    found.primary = _primary(found)
    found.carried = tuple(stage for stage in mixture.stages if stage in mixture.carried)
    return found


def _primary(found: LayerBlame) -> ConsequenceName | None:
    lossy = [name for name in PREFERRED if name in found.costs and found.costs[name].loss > 0]
    budget = OF_BUDGET.get(found.verdict.rule.split(" ")[0]) if found.verdict.answer == "explained" else None
    if budget in lossy:
        return budget
    for stage in found.failed:
        for name in lossy:
            if abs(found.costs[name].shapley.get(stage, 0.0)) > SILENT:
                return name
    return lossy[0] if lossy else None


def _answer(records: list[Record], policy: Policy, inputs: LayerInputs, own: Path, other: str) -> LayerBlame:
    [verdict] = judge([replace(record, path=own.name) for record in records], policy)
    isolated = {record.stage: failure(record, policy) for record in records if record.comparison == "isolated"}
    kind = inputs.kind
    return LayerBlame(
        case=verdict.case,
        layer=verdict.layer,
        kind=kind,
        path=own.name,
        other=other,
        verdict=verdict,
        failed={stage: fail for stage in stages_of(kind) if (fail := isolated.get(stage))},
        formats={stage: declared_format(stage, own.declares) for stage in stages_of(kind)},
    )


def _saved(run: RunDir, case: str, inputs: LayerInputs, path: Path) -> Result:
    """A saved trace as a result: its stages are judged again, nothing of the path is run."""
    result = Result(_load(run, case, inputs, path.name), [])
    for stage in stages_of(inputs.kind):
        if stage in result.trace:
            result.records.append(check_isolated(stage, inputs, result.trace, path.declares))
    return result


def _trace_of(run: RunDir | None, case: str, inputs: LayerInputs, path: Path) -> Trace:
    """The baseline's whole trace: saved, else run here."""
    if run and run.trace_file(case, inputs.layer, path.name).is_file():
        return _load(run, case, inputs, path.name)
    available = path.availability()
    if not available.ok:
        raise ValueError(f"baseline {path.name} cannot run here and has no saved trace: {available.why}")
    trace = run_path(path, inputs, case).trace
    missing = [stage for stage in stages_of(inputs.kind) if stage not in trace]
    if missing:
        raise ValueError(f"baseline {path.name} stopped before stage {missing[0]}: choose another --baseline")
    return trace


def _load(run: RunDir, case: str, inputs: LayerInputs, path: str) -> Trace:
    file = run.trace_file(case, inputs.layer, path)
    if not file.is_file():
        raise ValueError(f"{file} does not exist: run the case with --keep all, or leave out --trace")
    return Trace.load(file, inputs.row_position.device)
