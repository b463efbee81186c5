import json
import os

import pytest
import torch
from difftest.cases.case import Case

from difftest.runner import Plan, run_layer
from difftest.scale import accounts
from difftest.scale.accounts import Running
from difftest.scale.workers import MEMORY
from difftest.suite import lab
from difftest.suite.lab import Lab
from difftest.testing import CannotJudge

TINY = Case("tiny-9", "gaussian", (9,), rows=2, layers=(0, 1))
PLAN = Plan([TINY], ["oracle", "deepseek"])


@pytest.fixture
def on_a_gpu(monkeypatch, tmp_path):
    """A lab that believes to be on a GPU; what it runs runs on the CPU. Yields the ledger's content at each path."""
    held = []
    ledger = tmp_path / "memory-GPU-aa.json"

    def run(case, layer, paths, device, captured=None):
        assert device == "cuda"
        for result in run_layer(case, layer, paths, "cpu", captured):
            held.append(json.loads(ledger.read_text()))
            yield result

    monkeypatch.setattr(lab, "run_layer", run)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setenv("DIFFTEST_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-aa")
    monkeypatch.setenv(MEMORY, str(8 << 30))
    return held


def test_a_unit_holds_its_memory_and_each_path_is_built_once(on_a_gpu, tmp_path):
    made = Lab("cuda", "default", tmp_path / "records.jsonl", tmp_path)
    made.run(PLAN, TINY, 0)
    assert len(on_a_gpu) == 2 and all(set(held) == {str(os.getpid())} for held in on_a_gpu)
    assert (8 << 30) > on_a_gpu[0][str(os.getpid())] > (1 << 30)
    assert json.loads((tmp_path / "memory-GPU-aa.json").read_text()) == {}, "and gives it back"
    built = [json.loads(file.read_text())["built"] for file in (tmp_path / "cache/built").glob("*.json")]
    assert sorted(text.split(";")[0] for text in built) == ["deepseek", "oracle"]
    assert all("NVIDIA H200" in text and f"torch {torch.__version__.split('+')[0]}" in text for text in built)


def test_a_unit_runs_once_for_all_its_stages(tmp_path, monkeypatch):
    runs = []
    monkeypatch.setattr(lab, "run_layer", lambda *arguments: runs.append(arguments) or run_layer(*arguments))
    made = Lab("cpu", "default", tmp_path / "records.jsonl", tmp_path)
    for stage in ("kv", "attention"):
        for spec in PLAN.paths:
            assert {record.stage for record in made.stage(PLAN, TINY, 0, spec, stage)} == {stage}
    assert len(runs) == 1
    assert not list(tmp_path.glob("running-*")), "no note is left"


def test_a_worker_with_a_broken_cuda_context_makes_way_for_another(tmp_path, monkeypatch):
    def fault(self, inputs, trace):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def leave(code):
        raise SystemExit(code)

    monkeypatch.setattr("difftest.paths.deepseek.Deepseek.kv", fault)
    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    made = Lab("cpu", "default", tmp_path / "records.jsonl", tmp_path)
    with pytest.raises(SystemExit, match="70"):
        made.run(PLAN, TINY, 0)
    [note] = tmp_path.glob("running-*.json")
    assert json.loads(note.read_text())["path"] == "deepseek", "which the next worker will not run"
    assert "illegal memory access" in (tmp_path / "records.jsonl").read_text()
    monkeypatch.delenv("PYTEST_XDIST_WORKER")
    monkeypatch.setattr(accounts, "alive", lambda pid: False)
    (tmp_path / "records.jsonl").rename(tmp_path / "records-gw0.jsonl")
    made = Lab("cpu", "default", tmp_path / "records-gw1.jsonl", tmp_path)
    [crash] = made.stage(PLAN, TINY, 0, "deepseek", "kv")
    assert "illegal memory access" in crash.findings[0].message, "the next worker tells what the first one recorded"
    assert "deepseek" not in (tmp_path / "records-gw1.jsonl").read_text()
    made = Lab("cpu", "default", tmp_path / "more.jsonl", tmp_path)
    assert set(made.run(PLAN, TINY, 0)) == {"oracle", "deepseek"}, "a process that nobody replaces goes on"


def test_a_broken_context_that_the_judge_finds_ends_the_worker_too(tmp_path, monkeypatch):
    def fault(*arguments):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def leave(code):
        raise SystemExit(code)

    monkeypatch.setattr("difftest.runner.check_isolated", fault)
    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    made = Lab("cpu", "default", tmp_path / "records.jsonl", tmp_path)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        made.run(PLAN, TINY, 0)
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    with pytest.raises(SystemExit, match="70"):
        made.run(PLAN, TINY, 1)
    assert {json.loads(note.read_text())["path"] for note in tmp_path.glob("running-*.json")} == {"oracle"}


def test_a_path_that_killed_a_worker_is_not_run_again(tmp_path):
    dead = os.fork()
    if dead == 0:
        os._exit(0)
    os.waitpid(dead, 0)
    Running(tmp_path, dead).start("tiny-9", 0, "deepseek")
    made = Lab("cpu", "default", tmp_path / "records.jsonl", tmp_path)
    records = made.stage(PLAN, TINY, 0, "deepseek", "kv")
    with pytest.raises(AssertionError, match="the process that ran this path died"):
        made.check(records)
    with pytest.raises(CannotJudge, match="stopped at stage kv before attention"):
        made.stage(PLAN, TINY, 0, "deepseek", "attention")
    made.check(made.stage(PLAN, TINY, 0, "oracle", "kv"))
    made.check(made.stage(PLAN, TINY, 1, "deepseek", "kv")), "another layer of it does run"
