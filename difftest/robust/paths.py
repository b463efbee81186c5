"""Whether a path gives the same bits every time it runs."""

from collections.abc import Iterator

import torch
from torch import Tensor

from ..cases.generate import generate
from ..paths.base import get_path
from ..session import find_case
from ..stages import stages_of
from ..trace import Trace
from ..verdict import Verdict
from .finding import difference, same_bits, verdict

CASE = "decode-2571"
LAYER = 2
REPEATS = 20


def check(spec: str, device: str, repeats: int = REPEATS, case: str = CASE) -> Iterator[Verdict]:
    """One verdict a stage on `repeats` runs of a path: equal, or not and why that is allowed, or a bug.

    Every stage is run again on the same upstream tensors, those of the first run. Entries of a selection may come in
    any order; that is said and no fault.
    """
    path = get_path(spec)
    available = path.availability()
    if not available.ok:
        yield verdict(spec, None, "runs bitwise equal", available.why, "cannot judge")
        return
    inputs = generate(find_case(case), LAYER).to(device)
    first = path.run(inputs, case)
    for stage in stages_of(inputs.kind):
        answer = ""
        note = ""
        for number in range(1, repeats):
            again = path.stage(stage, inputs, _upstream(first))
            for name, want in first[stage].items():
                got = again[name]
                if same_bits(got, want):
                    continue
                if stage == "topk" and torch.equal(_sorted(got), _sorted(want)):
                    note = "the same entries in another order: blocks append them as they finish"
                    continue
                answer = answer or f"{stage}.{name}, run {number} and the first: {difference(got, want)}"
        yield _labelled(spec, stage, f"{repeats} runs bitwise equal", answer, note)


def _labelled(spec: str, stage: str, rule: str, why: str, note: str) -> Verdict:
    found = verdict(spec, stage, rule, why)  # type: ignore[arg-type]
    return found if why or not note else Verdict(**{**vars(found), "notes": (note,)})


def _upstream(trace: Trace) -> Trace:
    return Trace(trace.case, trace.layer, trace.path, dict(trace.stages))


def _sorted(value: Tensor) -> Tensor:
    return value.sort(-1).values
