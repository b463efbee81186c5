"""For people who test their own kernel: `assert_agrees`, and the cached runs behind the pytest suite."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path as File

from .cases.case import Case
from .paths.base import Path, get_path
from .record import Record, append_records
from .run_dir import RECORDS, RunDir
from .runner import Result, covers, run_layer
from .session import find_case
from .stages import StageName
from .verdict import Policy, explain_failure, judge, load_policy


class CannotJudge(Exception):
    """Nothing could be compared; the message says why."""


def resolve_device(device: str) -> str:
    """`auto` as `cuda` where torch sees a device, else `cpu`."""
    if device != "auto":
        return device
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def assert_agrees(
    path: str | Path,
    case: str | Case,
    layers: Sequence[int] = (),
    stages: Sequence[StageName] = (),
    device: str = "auto",
    policy: str = "default",
) -> list[Record]:
    """Fails unless every stage of `path` agrees with the exact stage on `case`; returns the records.

    path     a registered path's spec, or an object of your own `Path` class.
    case     a case id of `difftest list cases`, or a `Case`.
    layers   layers to run; the case's own by default.   stages: only these must agree; all by default.

    Raises AssertionError whose message names layer, stage, worst element, bound and the smallest bound that would have
    passed; CannotJudge where nothing could be compared.
    """
    path = get_path(path) if isinstance(path, str) else path
    case = find_case(case) if isinstance(case, str) else case
    available = path.availability()
    if not available.ok:
        raise CannotJudge(f"path {path.name} cannot run here: {available.why}; {available.install}")
    records: list[Record] = []
    for layer in layers or case.layers:
        for result in run_layer(case, layer, [path], resolve_device(device)):
            records += [record for record in result.records if not stages or record.stage in stages]
    _check(records, load_policy(policy))
    return records


def _check(records: list[Record], policy: Policy) -> None:
    for verdict in judge(records, policy):
        if verdict.exit_code == 1:
            raise AssertionError(explain_failure(verdict, records))
        if verdict.exit_code == 125:
            raise CannotJudge(str(verdict))


@dataclass
class Lab:
    """Runs each (case, layer) once for a list of paths and keeps the last; the suite asks it stage by stage."""

    device: str = "auto"
    policy: str = "default"
    records: File | None = None
    _key: tuple[str, int] | None = field(default=None, init=False)
    _results: dict[str, Result] = field(default_factory=dict, init=False)

    def result(self, case: Case, layer: int, spec: str, specs: Sequence[str]) -> Result | None:
        """This path's result, running the case and layer through all of `specs` if it is not the one at hand."""
        if self._key != (case.id, layer):
            paths = [get_path(name) for name in specs]
            ready = [path for path in paths if path.availability().ok and covers(path, case, layer)]
            self._results = {}
            names = {path.name: name for path, name in zip(paths, specs, strict=True)}
            for result in run_layer(case, layer, ready, resolve_device(self.device)):
                self._results[names[result.trace.path]] = result
                if self.records:
                    append_records(self.records, result.records)
            self._key = (case.id, layer)
        return self._results.get(spec)

    def check_stage(self, case: Case, layer: int, spec: str, stage: StageName, specs: Sequence[str]) -> None:
        """Raises AssertionError or CannotJudge for one stage of one path."""
        result = self.result(case, layer, spec, specs)
        if result is None:
            raise CannotJudge(f"path {spec} has nothing to say about {case.id} layer {layer}")
        records = [record for record in result.records if record.stage == stage]
        if not records:
            crashed = next((r.stage for r in result.records if r.findings or r.skipped), None)
            raise CannotJudge(f"{spec} stopped at stage {crashed} before {stage}")
        _check(records, load_policy(self.policy))


def gather(out: File, policy: str, interrupted: bool) -> None:
    """Joins the workers' records into one file and writes verdicts into `run.json`."""
    run = RunDir.open(out)
    for part in sorted(out.glob("records-*.jsonl")):
        with (out / RECORDS).open("a") as lines:
            lines.write(part.read_text())
        part.unlink()
    verdicts = judge(run.records(), load_policy(policy))
    run.write_manifest(
        status="interrupted" if interrupted else "complete",
        policy=policy,
        verdicts=[verdict.to_json() for verdict in verdicts],
    )
