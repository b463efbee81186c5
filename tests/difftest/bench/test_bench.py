"""The bench without a GPU: what rows say, what bf16 costs in capacity, one sentence where nothing can be measured."""

import json
from itertools import chain, repeat
from pathlib import Path

import pytest
import torch
from difftest.reference.config import load_config
from typer.testing import CliRunner

from difftest.bench import timing
from difftest.bench.capacity import capacity
from difftest.bench.row import Ceilings, Row, table
from difftest.bench.run import Bench
from difftest.bench.timing import Contender, compare
from difftest.cli import app

CEILINGS = Ceilings(read=4e12, copy=2e12, matmul=8e14)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopwatch that reads the launch's own answer, and no extra memory."""

    class Stopwatch:
        def time_us(self, launch):  # type: ignore[no-untyped-def]
            return launch()

        def loaded_us(self, launch):  # type: ignore[no-untyped-def]
            return launch()

    monkeypatch.setattr(timing, "Stopwatch", Stopwatch)
    monkeypatch.setattr(timing, "extra_bytes", lambda launch, result: 7)
    monkeypatch.setattr(timing, "capture", lambda launch: launch)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


def contender(form: str, times: list[float], **more: object) -> Contender:
    """A kernel whose launches last `times` microseconds in turn, the last for ever."""
    source = chain(times, repeat(times[-1]))
    values = {"kernel": "read", "shape": "s", "bytes": 400_000_000, "flops": 8_000_000_000, "ceiling": "read"}
    return Contender(format=form, launches=[lambda: next(source)], **{**values, **more})  # type: ignore[arg-type]


@pytest.mark.usefixtures("clock")
def test_rows_compare_with_the_fp8_row_of_their_kernel_and_shape() -> None:
    """400 MB at 4 TB/s and 8 GFLOP at 800 TFLOP/s take 100 us and 10 us; slow first launches do not count."""
    first = [9999.0] * (1 + timing.WARM_UP)
    rows = compare(
        [
            contender("fp8", [*first, 160.0]),
            contender("bf16", [*first, 200.0], note="tile"),
            contender("bf16", [first[0], 40.0], shape="other", ceiling="matmul"),
        ],
        CEILINGS,
        rounds=3,
    )
    assert [row.us for row in rows] == [160.0, 200.0, 40.0]
    assert [row.share_of_ceiling for row in rows] == pytest.approx([0.625, 0.5, 0.25])
    assert [row.ratio_to_fp8 for row in rows] == [1.0, 1.25, None]
    assert [row.extra_bytes for row in rows] == [7, 7, 7] and rows[1].note == "tile"


@pytest.mark.usefixtures("clock")
def test_a_kernel_that_cannot_run_has_a_row_that_says_why() -> None:
    def missing() -> None:
        raise ImportError("no deep_gemm here")

    rows = compare([Contender("read", "fp8", "s", [missing], 1, 1, "read"), contender("bf16", [5.0])], CEILINGS, 3)
    assert rows[0].us is None and rows[0].note == "not run: ImportError: no deep_gemm here"
    assert rows[1].us == 5.0 and rows[1].ratio_to_fp8 is None


def test_the_table_shows_rates_and_leaves_blanks() -> None:
    shown = table(
        [
            Row("read", "bf16", "64 x 16384", 70.0, 280_000_000, 70_000_000_000, 0.9, 1.6, 0, "n"),
            Row("read", "fp8", "64 x 16384", None, 1, 1, None, None, None, "not run: x"),
            Row("store", "bf16", "8", 2.0, 4000, 0, 0.1, None, 675_000_000),
        ]
    )
    assert shown[0] == {
        "kernel": "read",
        "shape": "64 x 16384",
        "format": "bf16",
        "us": "70.00",
        "GB/s": "4,000",
        "TFLOP/s": "1,000",
        "of ceiling": "90.0%",
        "to fp8": "1.60",
        "extra": "0",
        "note": "n",
    }
    assert [shown[1][key] for key in ("us", "GB/s", "of ceiling", "to fp8", "extra")] == [""] * 5
    assert shown[2]["TFLOP/s"] == "" and shown[2]["extra"] == "675 MB"


def test_bf16_keys_cost_651_bytes_a_token_and_a_twelfth_of_the_context() -> None:
    """132 and 256 bytes for every 4 tokens in each of V4-Flash's 21 CSA layers."""
    found = capacity(load_config("v4-flash"), 1_000_000_000, 0.5)
    assert found.index_bytes == {"fp8": 693.0, "bf16": 1344.0} and found.layers == 21
    assert found.total_bytes["bf16"] - found.total_bytes["fp8"] == pytest.approx(651.0)
    assert found.memory == 500_000_000
    assert found.tokens == {name: int(5e8 / size) for name, size in found.total_bytes.items()}
    assert found.lost == found.tokens["fp8"] - found.tokens["bf16"]
    assert found.lost_share == pytest.approx(651 / found.total_bytes["bf16"], rel=1e-3)


def test_the_file_has_ceilings_then_rows(tmp_path: Path) -> None:
    row = Row("decode read", "bf16", "s", 3.0, 1, 2, 0.5, 1.5, 0)
    bench = Bench({"gpu": "G"}, "2026-01-02", CEILINGS, [row], capacity(load_config("v4-flash"), 10**9, 0.2))
    bench.save(tmp_path / "bench.json")
    raw = json.loads((tmp_path / "bench.json").read_text())
    assert list(raw) == ["schema", "date", "environment", "ceilings", "rows", "capacity"]
    assert list(raw["ceilings"]) == ["read", "copy", "matmul"]
    names = {"kernel", "format", "shape", "us", "bytes", "flops", "share_of_ceiling", "ratio_to_fp8", "extra_bytes"}
    assert names <= set(raw["rows"][0])
    assert bench.throughput().endswith("1.50 at s.")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here: the bench would run")
def test_without_a_gpu_it_says_so_in_one_sentence() -> None:
    done = CliRunner().invoke(app, ["bench"])
    assert done.exit_code == 125
    assert done.stderr.strip() == "difftest: no CUDA device here, and the bench measures GPU kernels; run it on a GPU"


def test_bad_options_are_refused_before_anything_is_measured(tmp_path: Path) -> None:
    assert CliRunner().invoke(app, ["bench", "--memory-fraction", "0"]).exit_code == 2
    assert CliRunner().invoke(app, ["bench", "--json", str(tmp_path / "none" / "b.json")]).exit_code == 2
