"""The function and the fixture for people who test their own kernel."""

import pytest
import torch
from difftest.reference.inputs import LayerInputs

from difftest.paths.oracle import Oracle
from difftest.testing import CannotJudge, assert_agrees
from difftest.trace import StageTensors, Trace

from .small import LAYER, small_case


class Doubled(Oracle):
    """Head weights twice as large: selections stay right."""

    name = "doubled"

    def head_weight(self, inputs: LayerInputs, trace: Trace) -> StageTensors:
        return {"value": 2 * super().head_weight(inputs, trace)["value"]}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_the_function_returns_records_or_raises_with_the_stage() -> None:
    assert {record.layer for record in assert_agrees("bf16-k", small_case(), device="cpu")} == {LAYER}
    with pytest.raises(AssertionError, match=r"bug at head_weight: row .* the smallest that passes is"):
        assert_agrees(Doubled(), small_case(), device="cpu")
    assert_agrees(Doubled(), small_case(), device="cpu", stages=["topk"])


def test_what_cannot_run_here_cannot_be_judged() -> None:
    if torch.cuda.is_available():
        pytest.skip("needs a machine where the live path cannot run")
    with pytest.raises(CannotJudge, match="sglang-fp8 cannot run here: no CUDA device"):
        assert_agrees("sglang-fp8", small_case(), device="cpu")


def test_the_fixture_takes_device_and_policy_from_the_command_line(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        from dataclasses import replace
        from difftest.session import find_case

        def test_right(assert_agrees):
            assert_agrees("oracle", "gaussian-2117", layers=[2], stages=["compressed"])

        def test_absent(assert_agrees):
            assert_agrees("sglang-fp8", "gaussian-2117", layers=[2])
        """
    )
    done = pytester.runpytest("--difftest-device", "cpu", "-rs")
    done.assert_outcomes(passed=1, skipped=0 if torch.cuda.is_available() else 1)
