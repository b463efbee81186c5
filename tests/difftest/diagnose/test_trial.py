"""The contract with a verdict command: exit codes, fill-ins, the stage it names, and what is left of it."""

import json
import os
import time
from pathlib import Path

import pytest

from difftest.diagnose.environments import plain_environment
from difftest.diagnose.trial import Command, Place, first_error, read_report, stage_of


def place(tmp_path):
    return Place(tmp_path, plain_environment(), {"python": "/opt/a python", "commit": "abc"})


@pytest.mark.parametrize(
    ("line", "usage_skips", "answer"),
    [
        ("exit 0", False, "good"),
        ("exit 1", False, "bad"),
        ("exit 2", False, "bad"),
        ("exit 2", True, "skip"),
        ("exit 124", False, "bad"),
        ("exit 125", False, "skip"),
        ("exit 126", False, "skip"),
        ("no-such-command", False, "skip"),
        ("exit 128", False, "abort"),
        ("exit 255", False, "abort"),
        ("kill -ABRT $$", False, "abort"),
    ],
)
def test_exit_codes(tmp_path, line, usage_skips, answer):
    assert Command(line, usage_skips).run(place(tmp_path), 0, tmp_path / "log").answer == answer


def test_fill_ins_are_quoted_and_in_the_environment(tmp_path):
    line = (
        'test {python} = "/opt/a python" && test {seed}{commit} = 5abc && test $DIFFTEST_SEED/$DIFFTEST_COMMIT = 5/abc'
    )
    assert Command(line + " && test {tree} = $PWD").run(place(tmp_path), 5, tmp_path / "log").answer == "good"


def test_out_is_a_directory_of_the_run_wherever_the_command_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tree").mkdir()
    at = Place(tmp_path / "tree", plain_environment())
    assert Command("mkdir {out}").run(at, 0, Path("logs/first")).answer == "good"
    assert (tmp_path / "logs" / "first.run").is_dir()


def test_the_reason_is_the_last_line_that_is_no_hint(tmp_path):
    line = "echo 'no module named x' >&2; echo 'Note: install it' >&2; exit 125"
    assert Command(line).run(place(tmp_path), 0, tmp_path / "log").why == "exit code 125: no module named x"


def test_braces_of_the_shell_are_left_alone(tmp_path):
    assert (
        Command("x=3; test ${x} = $(echo '3' | awk '{print $1}')").run(place(tmp_path), 0, tmp_path / "log").code == 0
    )


def test_what_a_command_started_does_not_outlive_it(tmp_path):
    Command("sleep 60 & echo $! > left; exit 1").run(place(tmp_path), 0, tmp_path / "log")
    pid = int((tmp_path / "left").read_text())
    until = time.monotonic() + 5
    while time.monotonic() < until:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        with open(f"/proc/{pid}/stat") as stat:
            if stat.read().split()[2] == "Z":
                return
        time.sleep(0.01)
    raise AssertionError(f"process {pid} is still running")


def test_only_the_asked_stage_is_bad(tmp_path):
    line = 'echo \'{"stage": "topk"}\'; exit 1'
    assert Command(line, stage="topk").run(place(tmp_path), 0, tmp_path / "log").answer == "bad"
    other = Command(line, stage="score").run(place(tmp_path), 0, tmp_path / "log")
    assert (other.answer, other.why) == ("skip", "fails at topk, not at score")


RUN = {
    "exit_code": 1,
    "verdicts": [
        {"path": "oracle", "stage": "score", "exit_code": 0},
        {"path": "deepseek", "stage": "kv", "conclusion": "explained by format"},
        {"path": "bf16-k", "stage": "index_k", "exit_code": 1},
    ],
}


@pytest.mark.parametrize(
    ("printed", "stage"),
    [
        ('{"stage": "first"}\nprogress\n{"stage": "last"}\n', "last"),
        (json.dumps(RUN, indent=2) + "\ndone\n", "index_k"),
        ("no json here\n{broken\n", "from run.json"),
        ('{"stage": 3, "verdicts": []}\n', ""),
    ],
)
def test_the_stage_comes_from_the_last_json_or_run_json(tmp_path, printed, stage):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text(json.dumps({"verdicts": [{"stage": "from run.json"}]}))
    (tmp_path / "log.out").write_text(printed)
    assert stage_of(read_report(tmp_path / "log.out", tmp_path / "run")) == stage


@pytest.mark.parametrize(
    ("printed", "line"),
    [
        ("error: subprocess-exited-with-error\n  error: no folder 'x'\nhint: See above", "error: no folder 'x'"),
        ("compiling\na.cu(3): error: no type\nb.cu(4): error: no brace\nmake: *** failed\n", "a.cu(3): error: no type"),
        ("Traceback\nImportError of something\n", "ImportError of something"),
        ("", ""),
    ],
)
def test_a_failed_build_is_told_by_its_first_error(tmp_path, printed, line):
    (tmp_path / "log.err").write_text(printed)
    assert first_error(tmp_path / "log") == line


def test_no_report_names_no_stage(tmp_path):
    (tmp_path / "log.out").write_bytes(b"\xff\xfe not text")
    assert stage_of(read_report(tmp_path / "log.out", tmp_path / "none")) == ""
