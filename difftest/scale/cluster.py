"""Cases on a Ray cluster: one task a unit, retried when its worker dies, and recorded even when all tries fail."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..cases.case import Case
from ..environment import environment
from ..record import Record
from ..run_dir import RunDir
from ..runner import Plan, covers, open_paths, run_layer
from ..session import Outcome
from ..stages import stages_of
from ..verdict import Policy, judge
from .accounts import Planned, missing
from .needs import Unit, memory_bytes, recorded_seconds, seconds

INSTALL = 'pip install "difftest[cluster]"'
GPU_BYTES = 80 * 2**30
"""Memory of the smallest GPU that a share of one is reckoned against."""
SHARES = 20
"""A task's share of a GPU is rounded up to a twentieth, so that shares add up to whole GPUs."""
Say = Callable[[str], Any]


class NoRay(Exception):
    """Ray cannot be imported or reached; the message says what to do."""


def run_on_cluster(plan: Plan, policy: Policy, out: Path, address: str, retries: int, say: Say) -> Outcome:
    """Runs every unit of the plan as a Ray task and judges the records, which are on disk as soon as a task ends.

    The longest units start first. A task is tried again when its worker or node dies, `retries` times more, anywhere
    in the cluster; a unit that fails every time is recorded as not compared, with the reason (`cannot judge`).
    Every node needs difftest installed. NoRay if Ray is not installed or no cluster answers.
    """
    ray = _connect(address)
    run = RunDir.create(
        out,
        environment=environment(),
        cases={case.id: asdict(case) for case in plan.cases},
        paths=list(plan.paths),
        layers=list(plan.layers),
        device=plan.device,
        made_by="cluster",
    )
    try:
        for done, (unit, lines, why) in enumerate(_results(ray, plan, retries), 1):
            found = [Record.from_json(line) for line in lines]
            run.append([*found, *missing(_planned(plan, unit), found, {unit.name: why})])
            say(f"{done} of {len(plan.items())}: {unit.name}" + (f": {why}" if why else ""))
    finally:
        ray.shutdown()
    records = run.records()
    verdicts = judge(records, policy)
    run.write_manifest(status="complete", policy=policy.name, verdicts=[verdict.to_json() for verdict in verdicts])
    return Outcome(records, verdicts, {}, out, "complete", plan.paths)


def _connect(address: str) -> Any:
    """Ray, connected to the cluster at `address`; `local` starts one on this machine."""
    try:
        import ray
    except ImportError as error:
        raise NoRay(f"Ray is not installed; {INSTALL}") from error
    try:
        ray.init(address=None if address == "local" else address, include_dashboard=False, log_to_driver=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise NoRay(f"no Ray cluster answers at {address} ({error}); start one with `ray start --head`") from error
    return ray


def _results(ray: Any, plan: Plan, retries: int) -> Iterator[tuple[Unit, list[str], str]]:
    """(unit, its records as JSON lines, why there are none) as the tasks end."""
    waiting = {}
    task = ray.remote(run_unit)
    for case, layer in _longest_first(plan):
        options = {
            "max_retries": retries,
            "num_cpus": 1,
            "num_gpus": gpu_share(case, layer) if plan.device == "cuda" else 0,
        }
        sent = task.options(**options).remote(case.to_json(), layer, list(plan.paths), plan.device)
        waiting[sent] = Unit(case.id, layer)
    while waiting:
        [ready], _ = ray.wait(list(waiting), num_returns=1)
        unit = waiting.pop(ready)
        try:
            yield unit, ray.get(ready), ""
        except ray.exceptions.RayError as error:
            yield unit, [], f"{type(error).__name__} in each of {retries + 1} tries"


def run_unit(case: str, layer: int, specs: Sequence[str], device: str) -> list[str]:
    """What a worker does: runs one case and layer through all paths that can run there; records as JSON lines."""
    made = Case.from_json(case)
    paths, skipped = open_paths(specs, device)
    todo = [path for path in paths if covers(path, made, layer)]
    records = [record for result in run_layer(made, layer, todo, device) for record in result.records]
    kind = made.config.kind(layer)
    for spec, why in skipped.items():
        records += [
            Record(made.id, layer, kind, spec, stage, "isolated", "exact stage", skipped=why)
            for stage in stages_of(kind)
        ]
    return [record.to_json() for record in records]


def gpu_share(case: Case, layer: int) -> float:
    """Share of a GPU that the unit takes, by memory: a multiple of 1 / SHARES, at most 1."""
    return min(SHARES, -(-memory_bytes(case, layer) * SHARES // GPU_BYTES)) / SHARES


def _longest_first(plan: Plan) -> list[tuple[Case, int]]:
    recorded = recorded_seconds()
    return sorted(plan.items(), key=lambda item: -seconds(item[0], item[1], recorded))


def _planned(plan: Plan, unit: Unit) -> list[Planned]:
    case = next(case for case in plan.cases if case.id == unit.case)
    kind = case.config.kind(unit.layer)
    return [
        Planned(unit.case, unit.layer, path.name, stage, kind)
        for path in open_paths(plan.paths, plan.device)[0]
        if covers(path, case, unit.layer)
        for stage in stages_of(kind)
    ]
