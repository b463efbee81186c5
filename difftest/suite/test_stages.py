"""Every stage of every path computes what the exact stage computes, on the path's own upstream tensors."""

from collections.abc import Sequence

import pytest

from difftest.cases.case import Case
from difftest.stages import StageName
from difftest.testing import CannotJudge, Lab


def test_stage(difftest_lab: Lab, case: Case, layer: int, path: str, stage: StageName, paths: Sequence[str]) -> None:
    try:
        difftest_lab.check_stage(case, layer, path, stage, paths)
    except CannotJudge as reason:
        pytest.skip(f"cannot judge: {reason}")
