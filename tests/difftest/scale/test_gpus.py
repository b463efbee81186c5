import pytest

from difftest.scale import gpus, workers
from difftest.scale.gpus import MIB, Gpu, assign, visible_gpus, workers_per_gpu

LISTED = "0, GPU-aa, 143771, 140000\n1, GPU-bb, 143771, 70000\n2, GPU-cc, 143771, 143000\n"


@pytest.fixture
def three_gpus(tmp_path, monkeypatch):
    """An nvidia-smi that lists three GPUs, first on PATH."""
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{LISTED}END\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")


def test_unset_takes_every_gpu_by_uuid(three_gpus):
    assert [gpu.token for gpu in visible_gpus({})] == ["GPU-aa", "GPU-bb", "GPU-cc"]


def test_the_callers_devices_are_never_widened(three_gpus):
    found = visible_gpus({"CUDA_VISIBLE_DEVICES": "2,0"})
    assert [gpu.token for gpu in found] == ["2", "0"]
    assert [gpu.free for gpu in found] == [143000 * MIB, 140000 * MIB]


def test_cuda_stops_at_the_first_invalid_device(three_gpus):
    assert [gpu.token for gpu in visible_gpus({"CUDA_VISIBLE_DEVICES": "GPU-bb,-1,0"})] == ["GPU-bb"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == []


def test_a_failing_nvidia_smi_counts_as_none(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'Failed to initialize NVML'\nexit 9\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert visible_gpus({}) == []
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "1"}) == [Gpu("1")]


def test_workers_fit_into_free_memory():
    gpu = Gpu("0", 100, 70)
    assert [workers_per_gpu(gpu, need, 4) for need in (10, 30, 80)] == [4, 2, 1]
    assert workers_per_gpu(Gpu("0"), 10, 4) == 1, "memory that nobody tells is not shared"
    assert workers.count([gpu, gpu], 30, cores=16) == 4
    assert workers.count([gpu, gpu], 30, cores=3) == 3
    assert workers.count([gpu] * 8, 30, cores=2) == 8, "every GPU has a worker"


def test_every_gpu_has_a_worker_before_any_has_two():
    assert [gpu.token for gpu in assign([Gpu("3"), Gpu("5")], 5)] == ["3", "5", "3", "5", "3"]


def test_a_worker_starts_with_its_device_memory_and_threads(monkeypatch):
    monkeypatch.setattr(gpus.os, "cpu_count", lambda: 32)
    specs = workers.specs([Gpu("GPU-aa", 200, 100), Gpu("7")], 4, {})
    assert specs[0] == "popen//env:CUDA_VISIBLE_DEVICES=GPU-aa//env:DIFFTEST_GPU_MEMORY=95//env:OMP_NUM_THREADS=8"
    assert specs[1] == "popen//env:CUDA_VISIBLE_DEVICES=7//env:OMP_NUM_THREADS=8"
    assert "OMP" not in workers.specs([Gpu("7")], 1, {"OMP_NUM_THREADS": "2"})[0]
