"""From a user's request to a judged outcome: what `difftest run`, `difftest judge` and the pytest plugin share."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast, get_args

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from . import runner
from .capture import SPEC as CAPTURE
from .capture import load_capture
from .cases import registry
from .cases.case import Case, Profile
from .cases.field_reports import FIELD_REPORTS
from .environment import environment
from .paths.base import get_path
from .record import Record
from .reference.inputs import LayerInputs
from .run_dir import RunDir
from .stages import nearest
from .verdict import Policy, Verdict, judge, load_policy

EXIT_CODES = {"agrees": 0, "explained": 0, "bug": 1, "cannot judge": 125}


@dataclass(frozen=True)
class Request:
    """What a user asked for, before names are looked up."""

    profile: str
    cases: Sequence[str]
    paths: Sequence[str]
    layers: Sequence[int]
    device: str
    policy: str = "default"
    keep: str = "failed"
    seed: int = 0


@dataclass
class Outcome:
    """Records and the verdicts a policy gives them. Produced here, consumed by the reports and exit codes."""

    records: list[Record]
    verdicts: list[Verdict]
    skipped_paths: dict[str, str]
    directory: Path | None
    status: str
    asked_paths: Sequence[str] = ()

    @property
    def exit_code(self) -> int:
        """0 agrees, 1 disagrees, 125 cannot judge (nothing judged, or a path asked for by name is missing)."""
        codes = {_code(verdict) for verdict in self.verdicts}
        if 1 in codes:
            return 1
        missing = any(path in self.skipped_paths for path in self.asked_paths)
        return 125 if missing or not self.verdicts or 125 in codes or self.status == "interrupted" else 0

    def to_json(self) -> dict[str, Any]:
        return {
            "status": self.status,
            "exit_code": self.exit_code,
            "directory": str(self.directory) if self.directory else None,
            "verdicts": [verdict.to_json() for verdict in self.verdicts],
            "skipped_paths": self.skipped_paths,
        }


def _code(verdict: Verdict) -> int:
    return verdict.exit_code


def plan(request: Request) -> tuple[runner.Plan, Policy]:
    """Looks up every name. ValueError with the nearest names for an unknown case, path, layer, profile or policy."""
    captured = dict(part for name in request.cases if name.startswith(CAPTURE) for part in _captured(name))
    named = [find_case(name) for name in request.cases if not name.startswith(CAPTURE)]
    cases = named or ([] if captured else _profile(request.profile))
    cases = [replace(case, base_seed=case.base_seed + request.seed) for case in cases]
    default = runner.GPU_PATHS if request.device == "cuda" else runner.DEFAULT_PATHS
    paths = list(request.paths) or list(default)
    for spec in paths:
        get_path(spec)
    if request.keep not in get_args(runner.Keep):
        raise ValueError(f"--keep {request.keep!r} is none of {', '.join(get_args(runner.Keep))}")
    for case in cases:
        _check_layers(case, request.layers)
    made = runner.Plan(
        [*cases, *(case for case, _ in captured.values())],
        paths,
        request.layers,
        request.device,
        cast(runner.Keep, request.keep),
        captured={key: inputs for key, (_, inputs) in captured.items()},
    )
    return made, load_policy(request.policy)


def _captured(name: str) -> list[tuple[tuple[str, int], tuple[Case, LayerInputs]]]:
    """Cases and inputs of a capture file or folder, keyed by case id and layer."""
    return [((case.id, inputs.layer), (case, inputs)) for case, inputs in load_capture(name.removeprefix(CAPTURE))]


def find_case(name: str) -> Case:
    """The case of this id. ValueError with the nearest ids otherwise."""
    known = registry.all_cases()
    if name in FIELD_REPORTS:
        raise ValueError(f"{name} is a field report, a contract on one stage; check it with `difftest reports {name}`")
    if name not in known:
        raise ValueError(nearest(name, list(known), "case"))
    return known[name]


def check_path(spec: str) -> None:
    """ValueError with the nearest names unless `spec` names a path and its options."""
    get_path(spec)


def _profile(name: str) -> list[Case]:
    if name not in get_args(Profile):
        raise ValueError(f"unknown profile {name!r}; profiles are {', '.join(get_args(Profile))}")
    return registry.profile(cast(Profile, name))


def _check_layers(case: Case, layers: Sequence[int]) -> None:
    kinds = {case.config.kind(layer) for layer in case.layers}
    for layer in layers:
        if case.config.kind(layer) not in kinds:
            fitting = [number for kind in kinds for number in case.config.layers(kind)]
            close = sorted(fitting, key=lambda known: abs(known - layer))[:3]
            own = ", ".join(sorted(kinds))
            raise ValueError(
                f"layer {layer} is {case.config.kind(layer)} and case {case.id} is for {own} layers; "
                f"the nearest are {', '.join(map(str, sorted(close)))}"
            )


def run(made: runner.Plan, policy: Policy, folder: Path, console: Console) -> Outcome:
    """Runs a plan with a progress bar. An interrupt keeps what is finished and judges it."""
    out = RunDir.create(
        folder,
        environment=environment(),
        cases={case.id: asdict(case) for case in made.cases},
        paths=list(made.paths),
        layers=list(made.layers),
        device=made.device,
    )
    status = "complete"
    with _progress(console) as on_progress:
        try:
            runner.run(made, out, on_progress)
        except KeyboardInterrupt:
            status = "interrupted"
    records = out.records()
    verdicts = judge(records, policy)
    out.write_manifest(
        status=status,
        skipped_paths=made.skipped_paths,
        policy=policy.name,
        verdicts=[verdict.to_json() for verdict in verdicts],
    )
    return Outcome(records, verdicts, made.skipped_paths, folder, status, made.paths)


@contextmanager
def _progress(console: Console) -> Iterator[Callable[[runner.Progress], None]]:
    """A bar on a terminal; elsewhere a line on stderr for each case and layer, so that a log shows how far a run is."""
    if not console.is_terminal:
        started = time.monotonic()

        def tell(p: runner.Progress) -> None:
            if p.starts_layer:
                seconds = time.monotonic() - started
                print(f"[{seconds:5.0f} s] {p.done} of {p.total}: {p.label}", file=sys.stderr, flush=True)

        yield tell
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda p: bar.update(task, total=p.total, completed=p.done, description=p.label)


def judge_directory(directory: Path, policy: str) -> Outcome:
    """Judges the records of an earlier run. ValueError names the file and what is wrong with it."""
    stored = RunDir.open(directory)
    records = stored.records()
    verdicts = judge(records, load_policy(policy))
    manifest = stored.manifest
    return Outcome(records, verdicts, manifest.get("skipped_paths", {}), directory, manifest["status"])
