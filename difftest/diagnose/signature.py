"""What fails, as something that can be compared: a smaller case counts only if it fails the same way."""

import math
import re
from dataclasses import dataclass
from typing import Any, Self

import torch

from ..accumulated import check_accumulated
from ..isolated import check_isolated
from ..paths.base import Path, get_path
from ..record import Comparison, Finding, Record
from ..reference.inputs import LayerInputs
from ..runner import inputs_fault
from ..stages import STAGES, StageName, stages_of
from ..trace import Trace
from ..verdict import Policy, Verdict, failing, first_failure, judge

NUMBER = re.compile(r"\d[\d.,e+-]*")
SIGNS = {"+": ", got above exact", "-": ", got below exact", "nan": ", got NaN", "": ""}


@dataclass(frozen=True)
class Signature:
    """Stage, rule and sign of a failure: two failures with equal signatures are taken for the same one.

    A stage may break several rules at once; the signature is of one of them, whichever comes first in the verdict.

    comparison   isolated, or accumulated (a finding against the oracle, where every stage agrees by itself).
    rule         `excess`, another bounded metric, or the rule of a finding.
    sign         of got minus exact at the worst element, where the rule is about elements ("+", "-", "nan"); the factor
                 to two digits for `uniform_scale`; what a crash said, without its numbers; else empty.
    """

    stage: StageName
    comparison: Comparison
    rule: str
    sign: str = ""

    def words(self) -> str:
        """`index_k excess, got above exact`."""
        against = " against the oracle" if self.comparison == "accumulated" else ""
        return f"{self.stage} {self.rule}{against}{SIGNS.get(self.sign, f' ({self.sign})')}"

    def to_json(self) -> dict[str, str]:
        return {"stage": self.stage, "comparison": self.comparison, "rule": self.rule, "sign": self.sign}

    @classmethod
    def from_json(cls, raw: dict[str, str]) -> Self:
        """ValueError or KeyError for anything else than what `to_json` wrote."""
        if raw["stage"] not in STAGES or raw["comparison"] not in ("isolated", "accumulated"):
            raise ValueError(f"no failure is at stage {raw['stage']!r} in comparison {raw['comparison']!r}")
        return cls(raw["stage"], raw["comparison"], raw["rule"], raw["sign"])  # type: ignore[arg-type]


@dataclass(frozen=True)
class Examined:
    """One run of a path on a layer up to a stage, and what it amounts to.

    signature   of the failure; None if there is none.
    where       the element that fails most, as the record names it.
    """

    inputs: LayerInputs
    trace: Trace
    records: list[Record]
    verdict: Verdict
    signature: Signature | None
    where: dict[str, int]

    @property
    def passes(self) -> bool:
        return self.verdict.exit_code == 0


def examine(
    path: Path,
    inputs: LayerInputs,
    case: str,
    policy: Policy,
    wanted: Signature | None = None,
    device: str = "cpu",
) -> Examined:
    """Runs the stages of `path` in order up to the first that fails, and judges them.

    wanted   the failure that is looked for: nothing behind its stage runs, and where that stage breaks several rules
             the signature is of this one. Without it all stages run, and the signature is of the verdict's rule.
    """
    upto = wanted.stage if wanted else None
    oracle = wanted is None or wanted.comparison == "accumulated"
    moved = inputs.to(device)
    result = Trace(case, inputs.layer, path.name)
    records: list[Record] = []
    fault = inputs_fault(inputs)
    for stage in stages_of(inputs.kind):
        records.append(_skipped(result, inputs, stage, fault) if fault else _stage(path, moved, result, stage))
        if stage == upto or failing(records[-1], policy) or stage not in result:
            break
    if oracle and len(result.stages) == len(records) and not failing(records[-1], policy):
        exact = get_path("oracle").run(moved, case, upto=records[-1].stage)
        records += [check_accumulated(stage, moved, result, exact, path.declares) for stage in result.stages]
    verdict = judge(records, policy)[0]
    signature, where = _signature(verdict, records, policy, wanted)
    return Examined(inputs, result, records, verdict, signature, where)


def _stage(path: Path, inputs: LayerInputs, trace: Trace, stage: StageName) -> Record:
    try:
        trace.stages[stage] = path.stage(stage, inputs, trace)
    except (MemoryError, torch.OutOfMemoryError) as error:
        return _skipped(trace, inputs, stage, f"out of memory: {_first_line(error)}")
    except Exception as error:
        crash = Finding("crash", f"{type(error).__name__}: {_first_line(error)}")
        return _record(trace, inputs, stage, findings=[crash])
    return check_isolated(stage, inputs, trace, path.declares)


def _skipped(trace: Trace, inputs: LayerInputs, stage: StageName, why: str) -> Record:
    return _record(trace, inputs, stage, skipped=why)


def _record(trace: Trace, inputs: LayerInputs, stage: StageName, **rest: Any) -> Record:
    return Record(trace.case, inputs.layer, inputs.kind, trace.path, stage, "isolated", "exact stage", **rest)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _signature(
    verdict: Verdict, records: list[Record], policy: Policy, wanted: Signature | None
) -> tuple[Signature | None, dict[str, int]]:
    if verdict.answer != "bug" or verdict.stage is None:
        return None, {}
    failed = first_failure(records, policy)
    comparison: Comparison = "accumulated" if failed is None else "isolated"
    record = failed or next(r for r in records if r.comparison == comparison and r.findings)
    rule = verdict.rule
    if (
        wanted
        and (wanted.stage, wanted.comparison) == (record.stage, comparison)
        and _breaks(record, wanted.rule, policy)
    ):
        rule = wanted.rule
    finding = next((finding for finding in record.findings if finding.rule == rule), None)
    where = finding.where if finding else record.worst.where if record.worst else {}
    return Signature(record.stage, comparison, rule, _sign(rule, record, finding)), where


def _breaks(record: Record, rule: str, policy: Policy) -> bool:
    if any(finding.rule == rule for finding in record.findings):
        return True
    if rule not in policy.isolated or rule not in record.metrics or rule not in record.bounds:
        return False
    return not record.metrics[rule] <= policy.isolated[rule] * record.bounds[rule]


def _sign(rule: str, record: Record, finding: Finding | None) -> str:
    if finding is not None:
        factor = record.metrics.get("scale_factor", math.nan)
        return {"crash": NUMBER.sub("N", finding.message), "uniform_scale": f"times {factor:.2g}"}.get(rule, "")
    if rule != "excess" or record.worst is None:
        return ""
    difference = record.worst.got - record.worst.want
    return "nan" if math.isnan(difference) else "+" if difference > 0 else "-"
