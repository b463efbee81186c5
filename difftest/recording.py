"""`difftest record`: runs a live path on a GPU and writes its traces, for machines that have none."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path as File

from .cases.case import Case
from .cases.generate import generate
from .paths._recorded_format import compact
from .paths.base import Path, get_path
from .paths.recorded import INPUTS_FACT, fingerprint, recording_file
from .trace import Trace

RECORDED_PATH = "sglang-fp8"


def record_one(path: Path, case: Case, layer: int, device: str = "cuda") -> Trace:
    """The trace of one case and layer, on the CPU and in compact form.

    Facts: `recipe` (the case as JSON, from which the inputs are generated again), `inputs_sha256` (their fingerprint),
    `versions` (kernel packages, torch, triton and GPU, as the path reports them) and `date`.
    """
    inputs = generate(case, layer)
    trace = path.run(inputs.to(device), case.id)
    stages = {stage: {name: tensor.cpu() for name, tensor in parts.items()} for stage, parts in trace.stages.items()}
    facts = {"recipe": case.to_json(), INPUTS_FACT: fingerprint(inputs), "date": datetime.now(UTC).date().isoformat()}
    return compact(replace(trace, stages=stages, facts={**trace.facts, **facts}))


def record(
    cases: Sequence[Case],
    out: File,
    spec: str = RECORDED_PATH,
    device: str = "cuda",
    on_file: Callable[[File], None] = lambda _: None,
) -> list[File]:
    """Records every layer of every case into `out` and returns the files, `<case id>-layer<N>.safetensors`.

    A file that exists is replaced only once its successor is whole. ValueError says why if the path cannot run here.
    """
    path = get_path(spec)
    available = path.availability()
    if not available.ok:
        raise ValueError(f"{spec} cannot be recorded here: {available.why}. {available.install}".strip())
    out.mkdir(parents=True, exist_ok=True)
    files = []
    for case in cases:
        for layer in case.layers:
            file = recording_file(out, case.id, layer)
            record_one(path, case, layer, device).save(file)
            files.append(file)
            on_file(file)
    return files


def recipe(trace: Trace) -> Case:
    """The case that a recording was made from; KeyError if the trace is no recording."""
    return Case.from_json(json.dumps(json.loads(trace.facts["recipe"])))
