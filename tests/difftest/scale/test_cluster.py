"""On a real Ray, started on this machine. Not part of the quick suite: `make test-cluster`."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from difftest.cases.case import Case

from difftest import session
from difftest.record import Record
from difftest.runner import Plan
from difftest.scale.cluster import GPU_BYTES, gpu_share, run_on_cluster, run_unit
from difftest.verdict import load_policy

TASK = b"ray::run_unit"
CASES = (
    Case("tiny-9", "gaussian", (9,), rows=2, layers=(0, 1)),
    Case("small-517", "gaussian", (517,), rows=8, layers=(2,), overrides={"index_topk": 64}),
)
PLAN = Plan(CASES, ("oracle", "deepseek"))


def tasks_below_here():
    """Process ids of Ray workers that run a unit and were started by this process's cluster."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if (folder / "cmdline").read_bytes().startswith(TASK):
                    found.append(int(folder.name))
            except OSError:
                continue
    return found


class Killer(threading.Thread):
    """Kills workers that run a unit, up to `most` of them, while `done` is not set."""

    def __init__(self, most):
        super().__init__(daemon=True)
        self.most, self.killed, self.done = most, [], threading.Event()

    def run(self):
        while len(self.killed) < self.most and not self.done.is_set():
            for pid in tasks_below_here():
                if pid not in self.killed and len(self.killed) < self.most:
                    os.kill(pid, signal.SIGKILL)
                    self.killed.append(pid)
            time.sleep(0.01)


def test_a_unit_runs_as_it_does_here():
    records = [Record.from_json(line) for line in run_unit(CASES[0].to_json(), 0, ["oracle", "sglang-fp8"], "cpu")]
    assert {(one.path, one.stage) for one in records if not one.skipped} == {("oracle", "kv"), ("oracle", "attention")}
    assert [one.stage for one in records if one.path == "sglang-fp8" and one.skipped] == ["kv", "attention"]


def test_shares_of_a_gpu_are_by_memory():
    assert gpu_share(CASES[0], 0) == 0.05
    huge = Case("huge", "gaussian", (1 << 20,), rows=16384, layers=(2,))
    assert gpu_share(huge, 2) == 1.0
    assert GPU_BYTES > 0


@pytest.mark.cluster
@pytest.mark.parametrize("kills", [2, 1000])
def test_no_case_is_lost_when_workers_die(tmp_path, kills):
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'difftest[cluster]'")
    killer, said = Killer(kills), []
    killer.start()
    outcome = run_on_cluster(PLAN, load_policy("default"), tmp_path / "out", "local", 3, said.append)
    killer.done.set()
    assert killer.killed, "some worker died"
    seen = {(one.case, one.layer, one.path, one.stage) for one in outcome.records if one.comparison == "isolated"}
    assert len(seen) == 2 * (2 * 2 + 8), "every stage of every unit is recorded"
    assert len(said) == 3
    lost = [one for one in outcome.records if one.skipped.startswith("not run")]
    if kills < 4:
        assert not lost and outcome.exit_code == 0, "all were tried again"
    else:
        assert lost and outcome.exit_code == 125
        assert "in each of 4 tries" in lost[0].skipped


def test_without_ray_the_message_says_what_to_install(tmp_path, monkeypatch):
    import sys

    from typer.testing import CliRunner

    from difftest.cli import app

    monkeypatch.setitem(sys.modules, "ray", None)
    result = CliRunner().invoke(
        app, ["cluster", "--profile", "smoke", "--device", "cpu", "--out", str(tmp_path / "out")]
    )
    assert result.exit_code == 125 and 'pip install "difftest[cluster]"' in result.stderr
    assert session.EXIT_CODES["cannot judge"] == 125
