import pytest
import torch
from safetensors.torch import save_file

from difftest.trace import Trace


def made():
    trace = Trace("needle-4509", 2, "bf16-k", facts={"gpu": "none"})
    trace.stages["score"] = {"value": torch.randn(3, 5)}
    trace.stages["compressed"] = {"value": torch.randn(4, 2)}
    return trace


def test_a_trace_survives_the_disk_and_comes_back_in_stage_order(tmp_path):
    file = tmp_path / "t.safetensors"
    trace = made()
    trace.save(file)
    back = Trace.load(file)
    assert list(back.stages) == ["compressed", "score"]
    assert torch.equal(back.value("score"), trace.value("score"))
    assert (back.case, back.layer, back.path, back.facts) == ("needle-4509", 2, "bf16-k", {"gpu": "none"})
    assert list(tmp_path.iterdir()) == [file]


def test_a_foreign_safetensors_file_is_named(tmp_path):
    file = tmp_path / "foreign.safetensors"
    save_file({"x": torch.zeros(1)}, file)
    with pytest.raises(ValueError, match=r"foreign\.safetensors is not a difftest trace: its schema is None"):
        Trace.load(file)


def test_an_unknown_stage_is_answered_with_the_nearest(tmp_path):
    file = tmp_path / "t.safetensors"
    trace = made()
    trace.stages["scores"] = trace.stages.pop("score")
    trace.save(file)
    with pytest.raises(ValueError, match="unknown stage 'scores': did you mean score"):
        Trace.load(file)


def test_a_truncated_file_is_named_and_left_alone(tmp_path):
    file = tmp_path / "t.safetensors"
    made().save(file)
    half = file.read_bytes()[: file.stat().st_size // 2]
    file.write_bytes(half)
    with pytest.raises(ValueError, match=r"t\.safetensors cannot be read as a trace"):
        Trace.load(file)
    assert file.read_bytes() == half
