"""Recording: what is written comes back as the path's own trace with its recipe; a path that cannot run says why."""

from pathlib import Path

import pytest
import torch
from difftest.cases.case import Case
from difftest.cases.generate import generate

from difftest.paths.base import get_path
from difftest.paths.recorded import Recorded
from difftest.recording import recipe, record, record_one
from difftest.trace import Trace

SMALL = Case("rec-small", "gaussian", (300, 77), mode="chunked", chunk=101, rows=4, layers=(2, 3))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("recorded")
    files = record([SMALL], out, spec="sglang-fp8-model", device="cpu")
    assert [file.name for file in files] == ["rec-small-layer2.safetensors", "rec-small-layer3.safetensors"]
    return out


@pytest.mark.parametrize("layer", [2, 3])
def test_a_recording_is_the_paths_own_trace(folder: Path, layer: int) -> None:
    inputs = generate(SMALL, layer)
    fresh = get_path("sglang-fp8-model").run(inputs, SMALL.id)
    recorded = Recorded(folder, of="sglang-fp8-model").run(inputs, SMALL.id)
    assert recorded.stages.keys() == fresh.stages.keys()
    for stage, parts in fresh.stages.items():
        for name, tensor in parts.items():
            assert torch.equal(recorded[stage][name].nan_to_num(), tensor.nan_to_num()), f"{stage}.{name}"


def test_the_recipe_generates_the_recorded_inputs_again(folder: Path) -> None:
    trace = Trace.load(folder / "rec-small-layer2.safetensors")
    assert recipe(trace) == SMALL
    assert len(trace.facts["date"].split("-")) == 3


def test_a_recording_takes_less_than_its_trace(folder: Path, tmp_path: Path) -> None:
    trace = get_path("sglang-fp8-model").run(generate(SMALL, 2), SMALL.id)
    trace.save(tmp_path / "whole.safetensors")
    small = (folder / "rec-small-layer2.safetensors").stat().st_size
    assert small < 0.8 * (tmp_path / "whole.safetensors").stat().st_size


def test_a_path_that_cannot_run_says_why(tmp_path: Path) -> None:
    if get_path("sglang-fp8").availability().ok:
        pytest.skip("SGLang's kernels run here")
    with pytest.raises(ValueError, match="sglang-fp8 cannot be recorded here"):
        record([SMALL], tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_facts_of_the_path_are_kept() -> None:
    class Noted(type(get_path("sglang-fp8-model"))):  # type: ignore[misc]
        def topk(self, inputs, trace):  # type: ignore[no-untyped-def]
            trace.facts["note"] = "seen"
            return super().topk(inputs, trace)

    assert record_one(Noted(), SMALL, 2, "cpu").facts["note"] == "seen"
