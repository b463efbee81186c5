"""Tuning: the fastest candidate that runs is recorded, and nothing is tuned while a graph is captured."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from difftest.kernels import tile, tune
from difftest.kernels.tile import DECODE, HOPPER_TILE, Tile, candidates, choose

GPU = torch.device("cuda", 0)
BEST = Tile(stages=5, programs=0, split=16)


@pytest.fixture(autouse=True)
def gpu_and_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(tile.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch, "empty", lambda *size, **options: None)

    def read_clock(launch: Callable[[], float], scratch: object) -> float:
        return launch()

    monkeypatch.setattr(tune, "_time", read_clock)


def test_the_fastest_that_runs_is_recorded() -> None:
    def launch(candidate: Tile) -> float:
        if candidate == HOPPER_TILE:
            raise ValueError("not here")
        return 1.0 if candidate == BEST else 2.0

    assert BEST in candidates("decode")
    assert tune.tune("decode", 64, 4096, 1, launch, GPU) == BEST
    assert choose("decode", 60, 4000, 1, GPU) == BEST
    assert choose("decode", 8, 4000, 1, GPU) == DECODE[1]


def test_no_candidate_and_a_capture_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(candidate: Tile) -> float:
        raise RuntimeError("out of shared memory")

    with pytest.raises(RuntimeError, match="no candidate tile runs here for decode 1 x 64: out of shared memory"):
        tune.tune("decode", 1, 64, 1, launch, GPU)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="tune before the capture"):
        tune.tune("decode", 1, 64, 1, launch, GPU)
