"""The command line as a user meets it: output, exit codes, and one clear sentence for bad input."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import Result as Answer
from difftest.cases import registry
from typer.testing import CliRunner

from difftest import cli, runner, session
from difftest.paths.bf16_k import Bf16K

from .small import small_case

CASE = "small"


@pytest.fixture(autouse=True)
def a_small_case(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`small` is the only case of every profile, and runs are written below `tmp_path`."""
    monkeypatch.setattr(registry, "all_cases", lambda: {CASE: small_case()})
    monkeypatch.setattr(registry, "profile", lambda name: [small_case()])
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)


def difftest(*arguments: str) -> Answer:
    return CliRunner().invoke(cli.app, arguments)


def run(*arguments: str, out: str = "run") -> Answer:
    return difftest("run", "--device", "cpu", "--out", out, "--path", "oracle", *arguments)


def plant(monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16-k without its Hadamard transform of the query."""
    index_q = Bf16K.index_q

    def twice(self, inputs, trace):
        return {"value": index_q(self, inputs, trace)["value"].roll(1, -1)}

    monkeypatch.setattr(Bf16K, "index_q", twice)


def test_a_run_tells_its_tables_and_verdicts() -> None:
    answer = run("--path", "bf16-k")
    assert answer.exit_code == 0, answer.output
    lines = answer.output.splitlines()
    assert any(line.startswith("small   csa layer 2") for line in lines)
    assert any(line.split()[:3] == ["stage", "oracle", "bf16-k"] for line in lines)
    assert "records: run" in lines and lines[-1].startswith("AGREES")
    manifest = json.loads(Path("run/run.json").read_text())
    assert manifest["status"] == "complete" and len(manifest["verdicts"]) == 2
    assert manifest["environment"]["torch"]


def test_a_bug_comes_first_and_exits_1(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    answer = run("--path", "bf16-k")
    assert answer.exit_code == 1
    first = answer.stdout.splitlines()[0]
    assert first.startswith("first divergence: small layer 2 bf16-k: bug at index_q: row ")
    assert "got" in first and "exact" in first and "the smallest that passes is" in first
    assert "FAIL" in answer.output and answer.output.splitlines()[-1].startswith("DISAGREES: bf16-k")
    assert list(Path("run/traces").glob("*bf16-k.safetensors"))


def test_a_log_shows_how_far_a_run_is() -> None:
    answer = run("--path", "bf16-k")
    assert "0 of 2: small layer 2" in answer.stderr and "small layer 2" not in answer.stdout


def test_judge_needs_no_second_run(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    first = run("--path", "bf16-k", "--json")
    monkeypatch.setattr(runner, "run", None)
    again = difftest("judge", "run", "--json")
    assert again.exit_code == first.exit_code == 1
    assert json.loads(again.stdout)["verdicts"] == json.loads(first.stdout)["verdicts"]


def test_another_policy_may_judge_otherwise() -> None:
    run("--path", "sglang-fp4-model")
    assert difftest("judge", "run").exit_code == 0
    strict = difftest("judge", "run", "--policy", "strict")
    assert strict.exit_code == 1 and "DISAGREES" in strict.output


def test_diff_tells_what_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    run("--path", "bf16-k", "--keep", "all", out="before")
    plant(monkeypatch)
    run("--path", "bf16-k", "--keep", "all", out="after")
    assert difftest("diff", "before", "before").output.strip() == "no verdict and no selection differs"
    answer = difftest("diff", "before", "after")
    assert answer.exit_code == 1
    assert "verdict: small layer 2 bf16-k" in answer.output and "is bug at index_q" in answer.output
    assert "selection: small-layer2-bf16-k.safetensors differs in" in answer.output


def test_an_interrupt_keeps_what_is_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    run_path = runner.run_path

    def interrupted(path, *rest, **named):
        if path.name == "bf16-k":
            raise KeyboardInterrupt
        return run_path(path, *rest, **named)

    monkeypatch.setattr(runner, "run_path", interrupted)
    answer = run("--path", "bf16-k")
    assert answer.exit_code == 125 and "interrupted" in answer.output
    assert json.loads(Path("run/run.json").read_text())["status"] == "interrupted"
    assert "oracle" in difftest("judge", "run").output


def test_nothing_is_overwritten() -> None:
    assert run().exit_code == 0
    before = Path("run/records.jsonl").read_bytes()
    answer = run()
    assert answer.exit_code == 2 and "run is not empty: a run never overwrites" in answer.output
    assert Path("run/records.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--case", "smal"), "unknown case 'smal': did you mean small?"),
        (("--path", "bf16k"), "unknown path 'bf16k': did you mean bf16-k"),
        (("--path", "bf16-k:q=fp9"), "fp9"),
        (("--layer", "3", "--case", "small"), "layer 3 is hca and case small is for csa layers; the nearest are 2, 4"),
        (("--profile", "defualt"), "unknown profile 'defualt'; profiles are smoke, default, full, gpu"),
        (("--policy", "lax"), "lax"),
        (("--keep", "some"), "'some' is none of all, failed, none"),
        (("--case", "capture:nowhere"), "nowhere holds no capture"),
        (("--case", "t3-ties"), "t3-ties is a field report"),
    ],
)
def test_an_unknown_name_gets_one_sentence(arguments: tuple[str, ...], says: str) -> None:
    answer = run(*arguments)
    assert answer.exit_code == 2 and says in " ".join(answer.output.split())
    assert not Path("run").exists()


def test_without_a_gpu_live_paths_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    answer = difftest("run", "--path", "sglang-fp8", "--out", "run", "--device", "cpu")
    assert answer.exit_code == 125 and "not run: sglang-fp8: no CUDA device" in answer.output
    answer = difftest("run", "--device", "cuda")
    assert answer.exit_code == 125 and "install a CUDA build of torch" in answer.output


@pytest.mark.parametrize(
    ("file", "text", "says"),
    [
        ("run.json", "{", "run.json is not whole JSON"),
        ("run.json", '{"schema": 99}', "not a difftest run of schema 1"),
        ("records.jsonl", '{"schema": 99}\n{}\n\n', "records.jsonl:1 is not a difftest record"),
    ],
)
def test_foreign_and_truncated_files_are_named(file: str, text: str, says: str) -> None:
    run()
    Path("run", file).write_text(text)
    answer = difftest("judge", "run")
    assert answer.exit_code == 2 and says in " ".join(answer.output.split())
    assert Path("run", file).read_text() == text


def test_a_torn_last_record_is_left_out() -> None:
    run()
    with Path("run/records.jsonl").open("a") as lines:
        lines.write('{"schema": 1, "case": "sm')
    assert difftest("judge", "run").exit_code == 0


@pytest.mark.parametrize("what", ["cases", "paths", "stages"])
def test_lists_are_tables_and_json(what: str) -> None:
    rows = json.loads(difftest("list", what, "--json").output)
    table = difftest("list", what).output
    assert rows and all(str(next(iter(row.values()))) in table for row in rows)


def test_doctor_names_what_is_missing() -> None:
    checks = {check["what"]: check for check in json.loads(difftest("doctor", "--json").output)}
    assert checks["python"]["ok"] and checks["torch"]["ok"] and checks["path bf16-k"]["ok"]
    assert all(
        check["found"].startswith("missing")
        for check in checks.values()
        if check["ok"] is None and not check["what"].startswith("path ")
    )


def test_doctor_fails_where_a_required_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("difftest.doctor.package_version", lambda name: None)
    monkeypatch.setattr("difftest.doctor.find_spec", lambda name: None)
    answer = difftest("doctor")
    assert answer.exit_code == 128 and "pip install 'torch>=2.11,<2.15'" in " ".join(answer.output.split())


def test_a_fault_of_the_harness_is_not_a_verdict(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(session, "plan", lambda request: 1 / 0)
    monkeypatch.setattr("sys.argv", ["difftest", "run", "--device", "cpu"])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 128 and "internal error: ZeroDivisionError" in capsys.readouterr().err


def test_a_truncated_trace_is_named_and_left_alone() -> None:
    run("--path", "bf16-k", "--keep", "all", out="before")
    run("--path", "bf16-k", "--keep", "all", out="after")
    trace = Path("after/traces/small-layer2-bf16-k.safetensors")
    torn = trace.read_bytes()[:1000]
    trace.write_bytes(torn)
    answer = difftest("diff", "before", "after")
    says = " ".join(answer.output.split())
    assert answer.exit_code == 2 and f"{trace} cannot be read as a trace" in says and "record it again" in says
    assert trace.read_bytes() == torn
