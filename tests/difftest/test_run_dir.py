import pytest

from difftest.record import Record
from difftest.run_dir import RunDir

RECORD = Record("c", 2, "csa", "p", "score", "isolated", "exact stage")


def test_records_written_before_an_interrupt_can_be_read(tmp_path):
    run = RunDir.create(tmp_path / "run", device="cpu")
    run.append([RECORD])
    again = RunDir.open(tmp_path / "run")
    assert again.manifest["status"] == "running"
    assert again.records() == [RECORD]


def test_a_run_never_overwrites(tmp_path):
    RunDir.create(tmp_path / "run")
    with pytest.raises(FileExistsError, match="is not empty: a run never overwrites"):
        RunDir.create(tmp_path / "run")


@pytest.mark.parametrize(
    ("content", "fault"),
    [(None, "it has no run.json"), ("{", "is not whole JSON"), ("[]", "not a difftest run of schema 1")],
)
def test_a_directory_that_is_no_run_is_named(tmp_path, content, fault):
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    with pytest.raises(ValueError, match=fault):
        RunDir.open(tmp_path)


def test_the_options_of_a_path_make_no_folders(tmp_path) -> None:
    run = RunDir.create(tmp_path / "run")
    file = run.trace_file("capture:x", 2, "sglang-fp8@recorded:folder=/a/b")
    assert file.parent == tmp_path / "run/traces"
    assert file.name == "capture_x-layer2-sglang-fp8@recorded_folder=_a_b.safetensors"
