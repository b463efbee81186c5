"""Every stage of every path computes what the exact stage computes, on the path's own upstream tensors."""

from collections.abc import Callable

import pytest

from difftest.cases.case import Case
from difftest.report.properties import properties
from difftest.runner import Plan
from difftest.stages import StageName
from difftest.suite.lab import Lab
from difftest.testing import CannotJudge


def test_stage(
    difftest_lab: Lab,
    difftest_plan: Plan,
    record_property: Callable[[str, object], None],
    case: Case,
    layer: int,
    path: str,
    stage: StageName,
) -> None:
    for name, value in (("case", case.id), ("layer", layer), ("path", path), ("stage", stage)):
        record_property(name, value)
    try:
        records = difftest_lab.stage(difftest_plan, case, layer, path, stage)
        for name, value in properties(records):
            record_property(name, value)
        difftest_lab.check(records)
    except CannotJudge as reason:
        pytest.skip(f"cannot judge: {reason}")
