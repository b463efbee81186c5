import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from difftest.reference.inputs import LayerInputs

from difftest.paths.base import CannotFeed, get_path
from difftest.paths.recorded import INPUTS_FACT, Recorded, fingerprint, recording_file
from difftest.paths.sglang_fp8_model import SglangFp8Model
from difftest.trace import Trace


@pytest.fixture(scope="module")
def original(csa: LayerInputs) -> Trace:
    return SglangFp8Model().run(csa, "case")


@pytest.fixture
def folder(csa: LayerInputs, original: Trace, tmp_path: Path) -> Path:
    facts = {INPUTS_FACT: fingerprint(csa), "versions": json.dumps({"sglang": "0.5.23"})}
    replace(original, facts=facts).save(recording_file(tmp_path, "case", csa.layer))
    return tmp_path


def recorded(folder: Path) -> Recorded:
    return Recorded(folder, of="sglang-fp8-model")


def test_a_recording_is_returned_stage_by_stage_with_its_facts(csa: LayerInputs, original: Trace, folder: Path) -> None:
    trace = recorded(folder).run(csa, "case")
    assert trace.path == "sglang-fp8-model@recorded"
    assert json.loads(trace.facts["versions"]) == {"sglang": "0.5.23"}
    for stage, tensors in original.stages.items():
        assert set(trace[stage]) == set(tensors)
        for name, tensor in tensors.items():
            assert torch.equal(trace[stage][name], tensor), (stage, name)


def test_it_declares_what_the_recorded_path_declares(folder: Path) -> None:
    assert recorded(folder).declares == SglangFp8Model.declares
    live = get_path(f"sglang-fp8@recorded:folder={folder}")
    assert live.name.startswith("sglang-fp8@recorded:folder=")
    assert (live.declares.pool, live.declares.score) == ("fp32_fast", "fp8_wgmma")
    with pytest.raises(ValueError, match="not registered"):
        _ = Recorded(folder, of="nothing").declares


def test_has_says_which_cases_were_recorded(csa: LayerInputs, folder: Path, tmp_path: Path) -> None:
    path = recorded(folder)
    assert path.has("case", csa.layer) and path.availability().ok
    assert not path.has("case", csa.layer + 2) and not path.has("other", csa.layer)
    empty = recorded(tmp_path / "empty")
    assert not empty.availability().ok and "difftest record" in empty.availability().install


def test_a_case_that_was_not_recorded_is_named(csa: LayerInputs, folder: Path) -> None:
    with pytest.raises(ValueError, match="other layer 2 was not recorded"):
        recorded(folder).run(csa, "other")


def test_other_inputs_are_refused(csa: LayerInputs, folder: Path) -> None:
    changed = csa.attn_sink.clone()
    changed[3] += 1
    with pytest.raises(ValueError, match="recorded from other inputs"):
        recorded(folder).run(replace(csa, attn_sink=changed), "case")


def test_another_paths_recording_is_refused(csa: LayerInputs, folder: Path) -> None:
    with pytest.raises(ValueError, match="recorded from path 'sglang-fp8-model', not 'sglang-fp8'"):
        Recorded(folder).run(csa, "case")


def test_a_substituted_upstream_stage_cannot_be_fed(csa: LayerInputs, folder: Path) -> None:
    path = recorded(folder)
    whole = path.run(csa, "case")
    moved = {"value": whole.value("index_k") * 2}
    with pytest.raises(CannotFeed, match="another path's index_k"):
        path.run(csa, "case", given=Trace("case", csa.layer, "other", {"index_k": moved}))


def test_the_fingerprint_tells_dtype_shape_and_values_apart(csa: LayerInputs) -> None:
    first = fingerprint(csa)
    assert fingerprint(replace(csa)) == first
    assert fingerprint(replace(csa, attn_sink=csa.attn_sink.double())) != first
    assert fingerprint(replace(csa, attn_sink=csa.attn_sink.view(2, -1))) != first
    assert fingerprint(replace(csa, attn_sink=-csa.attn_sink)) != first
