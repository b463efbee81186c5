"""For people who test their own kernel: `assert_agrees`."""

from collections.abc import Sequence

from .cases.case import Case
from .paths.base import Path, get_path
from .record import Record
from .runner import run_layer
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
    __tracebackhide__ = True
    path = get_path(path) if isinstance(path, str) else path
    case = find_case(case) if isinstance(case, str) else case
    available = path.availability()
    if not available.ok:
        raise CannotJudge(f"path {path.name} cannot run here: {available.why}; {available.install}")
    records: list[Record] = []
    for layer in layers or case.layers:
        for result in run_layer(case, layer, [path], resolve_device(device)):
            records += [record for record in result.records if not stages or record.stage in stages]
    check_records(records, load_policy(policy))
    return records


def check_records(records: list[Record], policy: Policy) -> None:
    """Raises AssertionError for a red verdict on these records, CannotJudge where nothing was compared."""
    __tracebackhide__ = True
    for verdict in judge(records, policy):
        if verdict.exit_code == 1:
            raise AssertionError(explain_failure(verdict, records))
        if verdict.exit_code == 125:
            raise CannotJudge(str(verdict))
