import json
import os

import pytest

from difftest.record import read_records

TWO_GPUS = "#!/bin/sh\necho '0, GPU-aa, 143771, 143000'\necho '1, GPU-bb, 143771, 143000'\n"
PROBE = """
import os, sys
import pytest

AT_START = os.environ.get("CUDA_VISIBLE_DEVICES"), "torch" in sys.modules

@pytest.mark.parametrize("number", range(8))
def test_probe(number, worker_id):
    with open(f"seen-{worker_id}", "w") as file:
        file.write(f"{AT_START[0]} {AT_START[1]} {os.environ.get('OMP_NUM_THREADS')}")
"""


@pytest.fixture
def two_gpus(pytester, monkeypatch):
    """A host with two GPUs, as nvidia-smi tells it."""
    folder = pytester.mkdir("bin")
    folder.joinpath("nvidia-smi").write_text(TWO_GPUS)
    folder.joinpath("nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def seen(pytester):
    return sorted(file.read_text().split() for file in pytester.path.glob("seen-*"))


def test_each_worker_gets_one_of_the_callers_gpus_before_torch(pytester, two_gpus, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    pytester.makepyfile(PROBE)
    result = pytester.runpytest_subprocess("-n", "2", "--difftest-pin", "always", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=8)
    assert [line[:2] for line in seen(pytester)] == [["1", "False"]] * 2, "never outside the caller's devices"


def test_n_auto_is_workers_per_gpu_over_all_gpus(pytester, two_gpus, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    pytester.makepyfile(PROBE)
    options = ("-n", "auto", "--difftest-pin", "always", "--difftest-workers-per-gpu", "1", "-p", "no:cacheprovider")
    pytester.runpytest_subprocess(*options).assert_outcomes(passed=8)
    threads = str(max(1, (os.cpu_count() or 1) // 2))
    assert seen(pytester) == [["GPU-aa", "False", threads], ["GPU-bb", "False", threads]]


def test_other_peoples_tests_keep_their_devices(pytester, two_gpus, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    pytester.makepyfile(PROBE)
    pytester.runpytest_subprocess("-n", "2", "-p", "no:cacheprovider").assert_outcomes(passed=8)
    assert [line[0] for line in seen(pytester)] == ["0,1", "0,1"]


def test_a_wrong_number_of_workers_is_a_usage_error(pytester, two_gpus):
    pytester.makepyfile(PROBE)
    result = pytester.runpytest_subprocess(
        "-n", "auto", "--difftest-pin", "always", "--difftest-workers-per-gpu", "many"
    )
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--difftest-workers-per-gpu 'many' is no number*"])


KILLER = """
import os
from difftest.paths.deepseek import Deepseek

kv = Deepseek.kv

def die(self, inputs, trace):
    if inputs.layer == 1:
        os._exit(9)
    return kv(self, inputs, trace)

Deepseek.kv = die
"""


def test_every_case_is_accounted_for_when_a_worker_dies(suite, pytester):
    with pytester.path.joinpath("tinycases.py").open("a") as plugin:
        plugin.write(KILLER)
    options = ("--difftest-path", "deepseek", "--difftest-out", "out", "-n", "1")
    result = suite(*options, separate=True)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*first: tiny-9 layer 1 deepseek: bug at kv: *process that ran this path died*"])
    facts = json.loads((pytester.path / "out/run.json").read_text())
    answers = {(one["case"], one["layer"], one["path"]): one["answer"] for one in facts["verdicts"]}
    assert answers.pop(("tiny-9", 1, "deepseek")) == "bug"
    assert len(answers) == 5 and set(answers.values()) <= {"agrees", "explained"}
    assert facts["not_run"] == 0
    records = list(read_records(pytester.path / "out/records.jsonl"))
    keys = [(r.case, r.layer, r.path, r.stage, r.comparison) for r in records]
    assert len(keys) == len(set(keys)), "the unit that ran twice is recorded once"


def test_shards_split_by_duration_and_say_so(suite, pytester):
    pytest.importorskip("pytest_split", reason="pytest-split is not installed: pip install 'difftest[ci]'")
    from .test_options import durations

    pytester.path.joinpath(".test_durations").write_text(durations(tiny_9_layer0=1, tiny_9_layer1=2, tiny_300_layer3=9))
    for group in (1, 2):
        options = ("--splits", "2", "--group", str(group), "--splitting-algorithm", "least_duration")
        suite(*options, "--difftest-out", f"shard{group}").assert_outcomes(
            passed=(2, 4)[group - 1], deselected=(4, 2)[group - 1]
        )
    shards = [json.loads((pytester.path / f"shard{group}/run.json").read_text())["shard"] for group in (1, 2)]
    assert [shard["units"] for shard in shards] == [["tiny-300-layer3"], ["tiny-9-layer0", "tiny-9-layer1"]]
    assert shards[0]["plan"] == shards[1]["plan"] and shards[0]["all_units"] == 3


def test_the_plugin_costs_nothing_to_speak_of(pytester):
    """At most 0.5 s for a run with nothing to do: what the plugin imports and does, measured inside one process."""
    pytester.makepyfile(
        """
        import sys, time

        def test_import_time():
            for name in [name for name in sys.modules if name.split(".")[0] == "difftest"]:
                del sys.modules[name]
            started = time.perf_counter()
            import difftest.pytest_plugin
            assert time.perf_counter() - started < 0.5
            assert not {"torch", "numpy", "triton"} & set(sys.modules), "nothing heavy is imported"
        """
    )
    pytester.runpytest_subprocess("-p", "no:cacheprovider", "-p", "no:hypothesispytest").assert_outcomes(passed=1)
