"""The launch recipe: the two configurations, the picks, and bad usage."""

import os
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

import difftest.recall
from difftest.recall.cli import app

SCRIPT = Path(difftest.recall.__file__).parent / "launch.sh"


def launch(*words: str, **settings: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], "DRY_RUN": "1", **settings}
    return subprocess.run(["bash", str(SCRIPT), *words], env=environment, capture_output=True, text=True, check=False)


def test_fp8_leaves_sglang_as_it_is() -> None:
    got = launch("fp8").stdout
    assert got.startswith("SGLANG_DSV4_BF16_INDEX_K=0 python -m sglang.launch_server")
    assert "--mem-fraction-static" not in got


def test_bf16_sets_the_flag_and_the_memory_fraction() -> None:
    got = launch("bf16", "--log-level", "warning", MODEL="/models/flash", TP="8").stdout
    assert got.startswith("SGLANG_DSV4_BF16_INDEX_K=1 ")
    assert "--mem-fraction-static 0.80" in got
    assert "--model-path /models/flash --tp-size 8" in got
    assert got.rstrip().endswith("--log-level warning")


def test_picks_need_unsharded_attention() -> None:
    assert "--enable-return-indexer-topk --attn-dp-size 4" in launch("fp8", PICKS="1").stdout


def test_the_command_prints_the_script() -> None:
    assert CliRunner().invoke(app, ["launch"]).output == SCRIPT.read_text()


@pytest.mark.parametrize("words", [[], ["int8"]])
def test_bad_usage_is_one_sentence(words: list[str]) -> None:
    got = launch(*words)
    assert got.returncode == 2
    assert "give fp8 or bf16" in got.stderr
