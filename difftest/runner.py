"""Runs case x layer x path, compares every stage twice and writes the records as they come."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Literal

import torch
from torch import Tensor

from .accumulated import check_accumulated
from .cases.case import Case
from .cases.generate import generate
from .isolated import check_isolated
from .memory import limited, peak_bytes
from .needle_facts import with_needles
from .paths.base import CannotFeed, Path, get_path
from .paths.recorded import Recorded
from .record import Finding, Record
from .reference.inputs import CompressorInputs, LayerInputs
from .run_dir import RunDir
from .stages import StageName, stages_of
from .trace import Trace

DEFAULT_PATHS = ("oracle", "deepseek", "sglang-fp8-model", "sglang-fp8@recorded", "bf16-k")
GPU_PATHS = ("oracle", "deepseek", "sglang-fp8", "sglang-fp8-model", "bf16-k", "bf16-k-naive")
Keep = Literal["all", "failed", "none"]


@dataclass
class Result:
    """One path's trace and records for one case and layer. `trace` lacks the stages after a crash."""

    trace: Trace
    records: list[Record]


@dataclass
class Progress:
    """How far a run is; handed to `on_progress` when a layer of a case starts and after every path of it."""

    done: int
    total: int
    label: str
    starts_layer: bool = False


def inputs_fault(inputs: LayerInputs) -> str:
    """Names the first NaN or infinity of the inputs as `tensor[position]`, or an empty string."""
    for name, tensor in _input_tensors(inputs):
        if tensor.is_floating_point():
            bad = ~torch.isfinite(tensor)
            if bad.any():
                where = ", ".join(str(int(index)) for index in bad.nonzero()[0])
                return f"{tensor[tuple(bad.nonzero()[0])].item()} in {name}[{where}]"
    return ""


def _input_tensors(inputs: LayerInputs) -> Iterator[tuple[str, Tensor]]:
    for item in fields(inputs):
        value = getattr(inputs, item.name)
        if isinstance(value, Tensor):
            yield item.name, value
        elif isinstance(value, CompressorInputs):
            yield from ((f"{item.name}.{part.name}", getattr(value, part.name)) for part in fields(value))


def run_path(
    path: Path, inputs: LayerInputs, case: str, given: Trace | None = None, memory_share: float = 1.0
) -> Result:
    """Runs one path stage by stage, with an isolated record of each; stages in `given` are taken from it unjudged.

    memory_share: of the GPU's memory, what a stage may take beyond what is in use.

    A stage that raises ends the path: running out of memory and inputs that the path cannot take are results of their
    own (`skipped`), anything else a `crash` finding at that stage, so the records before it say what was verified.
    """
    result, device = Result(Trace(case, inputs.layer, path.name), []), inputs.row_position.device
    for stage in stages_of(inputs.kind):
        if given and stage in given:
            result.trace.stages[stage] = given[stage]
            continue
        started, before = time.perf_counter(), peak_bytes(device, reset=True)
        try:
            with limited(device, memory_share):
                result.trace.stages[stage] = path.stage(stage, inputs, result.trace)
        except (MemoryError, torch.OutOfMemoryError) as error:
            result.records.append(_record(path, inputs, case, stage, skipped=f"out of memory: {_first_line(error)}"))
            return result
        except CannotFeed as error:
            result.records.append(_record(path, inputs, case, stage, skipped=_first_line(error)))
            return result
        except Exception as error:
            crash = Finding("crash", f"{type(error).__name__}: {_first_line(error)}")
            result.records.append(_record(path, inputs, case, stage, findings=[crash]))
            return result
        facts = {"seconds": time.perf_counter() - started, "peak_bytes": peak_bytes(device) - before}
        record = check_isolated(stage, inputs, result.trace, path.declares)
        result.records.append(replace(record, facts={**record.facts, **facts}))
    return result


def accumulate(result: Result, inputs: LayerInputs, baseline: Trace, path: Path) -> None:
    """Adds the accumulated record of every stage that both traces have."""
    for stage in result.trace.stages:
        if stage in baseline:
            result.records.append(check_accumulated(stage, inputs, result.trace, baseline, path.declares))


def _record(path: Path, inputs: LayerInputs, case: str, stage: StageName, **rest: object) -> Record:
    return Record(case, inputs.layer, inputs.kind, path.name, stage, "isolated", "exact stage", **rest)  # type: ignore[arg-type]


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@dataclass
class Plan:
    """What a run does: cases and their layers, and paths by spec. Built by the command line and the pytest plugin.

    captured  inputs that are not generated, by case id and layer.
    """

    cases: Sequence[Case]
    paths: Sequence[str]
    layers: Sequence[int] = ()
    device: str = "cpu"
    keep: Keep = "all"
    skipped_paths: dict[str, str] = field(default_factory=dict)
    captured: dict[tuple[str, int], LayerInputs] = field(default_factory=dict)

    def layers_of(self, case: Case) -> tuple[int, ...]:
        return tuple(self.layers) or case.layers

    def items(self) -> list[tuple[Case, int]]:
        return [(case, layer) for case in self.cases for layer in self.layers_of(case)]


def open_paths(specs: Iterable[str], device: str = "cpu") -> tuple[list[Path], dict[str, str]]:
    """Paths that can run here, and for the others why not and what to install."""
    ready: list[Path] = []
    skipped: dict[str, str] = {}
    for spec in specs:
        path = get_path(spec)
        available = path.availability()
        if available.ok:
            ready.append(path)
        else:
            skipped[spec] = f"{available.why}; {available.install}" if available.install else available.why
    return ready, skipped


def covers(path: Path, case: Case, layer: int) -> bool:
    """Whether `path` has anything to say about this case and layer: a recording exists only for some."""
    return not isinstance(path, Recorded) or path.has(case.id, layer)


def run(plan: Plan, out: RunDir, on_progress: Callable[[Progress], None] = lambda _: None) -> list[Record]:
    """Runs the plan into `out` and returns all records. Records are on disk before the next path starts."""
    paths, plan.skipped_paths = open_paths(plan.paths)
    work = [(case, layer, [path for path in paths if covers(path, case, layer)]) for case, layer in plan.items()]
    total, done, records = sum(len(todo) for *_, todo in work), 0, []
    for case, layer, todo in work:
        if not todo:
            continue
        on_progress(Progress(done, total, f"{case.id} layer {layer}: inputs and oracle", True))
        for result in run_layer(case, layer, todo, plan.device, plan.captured.get((case.id, layer))):
            done += 1
            on_progress(Progress(done, total, f"{case.id} layer {layer}: {result.trace.path}"))
            out.append(result.records)
            records.extend(result.records)
            if plan.keep == "all" or (plan.keep == "failed" and _failed(result.records)):
                result.trace.save(out.trace_file(case.id, layer, result.trace.path))
    return records


def run_layer(
    case: Case, layer: int, paths: Sequence[Path], device: str = "cpu", captured: LayerInputs | None = None
) -> Iterator[Result]:
    """Yields one result a path for one case and layer, all on the same inputs and against the same oracle.

    The inputs are generated from the case's recipe unless `captured` ones are given.

    The oracle's trace stays alive throughout, so no path is handed one of its buffers with the right answer in it,
    and one path's trace is dropped before the next is made: memory holds two traces, however many paths there are.
    """
    inputs = (captured or generate(case, layer)).to(device)
    fault = inputs_fault(inputs)
    if fault:
        for path in paths:
            skipped = [_record(path, inputs, case.id, stage, skipped=fault) for stage in stages_of(inputs.kind)]
            yield Result(Trace(case.id, layer, path.name), skipped)
        return
    oracle = get_path("oracle")
    first = run_path(oracle, inputs, case.id)
    for path in paths:
        result = first if path.name == oracle.name else run_path(path, inputs, case.id, memory_share=case.memory_share)
        accumulate(result, inputs, first.trace, path)
        result.records = with_needles(result.records, result.trace, inputs, case)
        yield result


def _failed(records: Iterable[Record]) -> bool:
    return any(record.findings or record.metrics.get("excess", 0) > 1 for record in records)
