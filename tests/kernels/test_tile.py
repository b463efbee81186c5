"""Tile choices: recorded ones win, damaged records cost nothing but speed, the CPU has its own."""

from pathlib import Path

import pytest
import torch
from difftest.kernels import tile
from difftest.kernels.tile import (
    DECODE,
    HOPPER_FOUR,
    INTERPRETED_TILE,
    PREFILL,
    SMALL_PREFILL,
    Tile,
    choose,
    portable,
    record,
    records_file,
)

GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def gpu_and_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(tile.CACHE_VARIABLE, str(tmp_path / "kernels"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


def test_the_cpu_has_large_steps() -> None:
    assert choose("decode", 8, 1 << 18, 1, torch.device("cpu")) == INTERPRETED_TILE


def test_a_record_wins_over_the_default_for_its_shape_only() -> None:
    best = Tile(stages=7, programs=2)
    assert choose("decode", 64, 65536, 1, GPU) == DECODE[1]
    record("decode", 64, 65536, 1, GPU, best)
    record("decode", 8, 512, 1, GPU, Tile(stages=2))
    assert choose("decode", 63, 65000, 1, GPU) == best
    assert choose("decode", 64, 65537, 1, GPU) == DECODE[1]
    assert portable("decode", 2, GPU) == DECODE[2]
    assert choose("prefill", 8192, 8192, 8192, GPU) == HOPPER_FOUR
    assert portable("prefill", 8192, GPU) == PREFILL


@pytest.mark.parametrize("text", ["", "{", "[]", '{"key": {"colour": 1}}', '{"key": 3}'])
def test_damaged_records_are_empty_and_overwritten(text: str) -> None:
    records_file().parent.mkdir(parents=True)
    records_file().write_text(text)
    assert choose("decode", 64, 65536, 1, GPU) == DECODE[1]
    record("decode", 64, 65536, 1, GPU, Tile(stages=3))
    assert choose("decode", 64, 65536, 1, GPU) == Tile(stages=3)


def test_other_gpus_get_smaller_prefill_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (12, 0))
    assert choose("prefill", 8192, 8192, 8192, GPU) == SMALL_PREFILL
    assert choose("decode", 64, 65536, 1, GPU) == DECODE[1]


@pytest.mark.parametrize("group", [1, 2, 3])
def test_queries_of_a_decode_tile_are_a_power_of_two_that_divides_the_request(group: int) -> None:
    """Triton's ranges are powers of two, and a tile must not reach into the next request."""
    for made in (portable("decode", group, GPU), *tile.candidates("decode", group)):
        assert group % made.group == 0 and made.group & (made.group - 1) == 0
