"""Running paths: crashes, missing memory and refused inputs become records; stages can be substituted."""

from pathlib import Path as File

import pytest
import torch
from difftest.reference.inputs import LayerInputs

from difftest import runner, session
from difftest.capture import Capture, capture_file
from difftest.paths.base import CannotFeed, get_path
from difftest.paths.oracle import Oracle
from difftest.record import Record
from difftest.run_dir import RunDir
from difftest.trace import StageTensors, Trace
from difftest.verdict import judge, load_policy

from .small import LAYER, small_case, small_inputs

POLICY = load_policy("default")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


class Stops(Oracle):
    """An oracle whose scores raise."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def score(self, inputs: LayerInputs, trace: Trace) -> StageTensors:
        raise self.error


def stages(records: list[Record]) -> list[str]:
    return [record.stage for record in records if record.comparison == "isolated"]


def test_a_crash_names_the_stages_verified_before_it() -> None:
    result = runner.run_path(Stops(RuntimeError("illegal memory access\nat line 3")), small_inputs(), "small")
    assert stages(result.records) == ["compressed", "index_k", "index_q", "head_weight", "score"]
    (verdict,) = judge(result.records, POLICY)
    assert (verdict.answer, verdict.stage, verdict.rule) == ("bug", "score", "crash")
    assert "illegal memory access" in verdict.why and "line 3" not in verdict.why
    assert verdict.why.endswith("verified before it: compressed, index_k, index_q, head_weight")


@pytest.mark.parametrize(
    "error", [MemoryError("22 GiB"), torch.OutOfMemoryError("22 GiB"), CannotFeed("no bf16 number")]
)
def test_what_a_path_cannot_do_is_no_bug(error: Exception) -> None:
    result = runner.run_path(Stops(error), small_inputs(), "small")
    (verdict,) = judge(result.records, POLICY)
    assert (verdict.answer, verdict.exit_code) == ("cannot judge", 125)
    assert str(error) in verdict.why


def test_a_given_stage_is_taken_and_not_judged() -> None:
    inputs = small_inputs()
    other = get_path("deepseek").run(inputs, "small", upto="index_k")
    given = Trace("small", LAYER, "deepseek", {"index_k": other["index_k"]})
    result = runner.run_path(Oracle(), inputs, "small", given)
    assert "index_k" not in stages(result.records) and len(stages(result.records)) == 7
    assert torch.equal(result.trace.value("index_k"), other.value("index_k"))
    alone = Oracle().run(inputs, "small")
    assert not torch.equal(result.trace.value("score"), alone.value("score"))
    assert judge(result.records, POLICY)[0].answer == "agrees"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_inputs_that_are_not_finite_cannot_be_judged(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = small_inputs()
    assert inputs.index is not None
    inputs.index.kv_score[5, 17] = value
    monkeypatch.setattr(runner, "generate", lambda case, layer: inputs)
    (result,) = runner.run_layer(small_case(), LAYER, [Oracle()])
    (verdict,) = judge(result.records, POLICY)
    assert verdict.answer == "cannot judge" and f"{value} in index.kv_score[5, 17]" in verdict.why


def test_captured_inputs_run_as_a_case(tmp_path: File) -> None:
    Capture(small_case(4), small_inputs(4)).save(capture_file(tmp_path / "captures", LAYER))
    request = session.Request("default", [f"capture:{tmp_path / 'captures'}"], ["oracle", "bf16-k"], [], "cpu")
    plan, policy = session.plan(request)
    records = runner.run(plan, RunDir.create(tmp_path / "run"))
    assert [verdict.path for verdict in judge(records, policy)] == ["oracle", "bf16-k"]
    assert {verdict.answer for verdict in judge(records, policy)} <= {"agrees", "explained"}
    (want,) = runner.run_layer(small_case(4), LAYER, [get_path("bf16-k")])
    values = {(r.stage, r.comparison): r.metrics for r in want.records}
    for record in records:
        if record.path == "bf16-k":
            assert record.metrics == values[record.stage, record.comparison]


def test_the_name_of_a_path_tells_its_options() -> None:
    assert get_path("bf16-k:q=fp8").name == "bf16-k:q=fp8"
    assert get_path("deepseek:kv_fake_quant=intended").name == "deepseek:kv_fake_quant=intended"
    assert get_path("deepseek").name == "deepseek"


def test_quick_profiles_run_fewer_layers() -> None:
    layers = {name: sum(len(case.layers) for case in session._profile(name)) for name in ("smoke", "default", "full")}
    assert layers["smoke"] < layers["default"] < layers["full"]
    needle = next(case for case in session._profile("default") if case.id == "needle-22597")
    assert len(needle.layers) == 4 and max(needle.lengths) == 22597
