"""The census: statistics of known keys, recall ordering of formats, ties that bf16 makes, and the command."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import typer
from difftest.cases.case import Case
from difftest.cases.generate import generate
from typer.testing import CliRunner

from difftest.capture import Capture
from difftest.census import Census, key_statistics, stored, take_census
from difftest.data_cli import census_command, weights_command

SMALL = {"index_n_heads": 8, "num_attention_heads": 2, "index_topk": 32, "head_dim": 128}


def census(length: int = 1200, family: str = "gaussian", layer: int = 2) -> Census:
    case = Case(f"census-{family}", family, (length,), rows=16, layers=(layer,), overrides=SMALL)
    return take_census(case.id, generate(case, layer))


def test_finer_formats_keep_more() -> None:
    recalls = {recall.format: recall for recall in census().recalls}
    means = [recalls[name].mean for name in ("bf16 q and k", "fp8 k", "fp8 q and k", "fp4 q and k")]
    assert means == sorted(means, reverse=True)
    assert means[0] > 0.98 > 0.95 > means[-1]
    assert all(recall.worst <= recall.low <= recall.mean <= 1 for recall in recalls.values())


def test_bf16_scores_tie_at_the_cut() -> None:
    boundary = census().boundary
    assert boundary is not None
    assert boundary.tied < boundary.tied_bf16
    assert boundary.equal_bf16 > 1
    assert 0 < boundary.gap < 1


def test_short_prompts_say_that_nothing_is_selected() -> None:
    short = census(length=100)
    assert (short.rows, short.boundary, short.recalls) == (0, None, ())
    assert short.note == "selection not exercised: at most 25 of 32 entries visible"


def test_statistics_of_known_keys() -> None:
    """A spike has crest sqrt(128) and becomes constant under the Hadamard transform; a tiny key is under the floor."""
    keys = torch.zeros(2, 128, dtype=torch.float64)
    keys[0, 5] = 4.0
    keys[1, 7] = 1e-5
    known = key_statistics(keys)
    assert known.crest == pytest.approx(128**0.5)
    assert known.before == pytest.approx(1.0)
    assert known.floored == 0.5
    assert known.largest == 4.0
    assert key_statistics(torch.zeros(0, 128)).rms == 0.0


def test_a_format_stores_what_it_can_hold() -> None:
    values = torch.randn(3, 128, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(stored(values, "none"), values)
    assert torch.equal(stored(values, "bf16"), values.bfloat16().double())
    error = (stored(values, "e4m3") - values).abs()
    assert (error <= values.abs() * 2**-4 + values.abs().amax(-1, keepdim=True) / 448 * 2**-10).all()


def test_layers_without_an_indexer_are_refused() -> None:
    case = Case("hca", "gaussian", (300,), rows=4, layers=(3,), overrides=SMALL)
    with pytest.raises(ValueError, match="is a hca layer, which has no indexer"):
        take_census("hca", generate(case, 3))


def _files() -> ModuleType:
    name = "difftest_checkpoint_files"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / "checkpoint_files.py")
        assert spec and spec.loader
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.fixture(scope="module")
def app() -> typer.Typer:
    made = typer.Typer()
    made.command("weights")(weights_command)
    made.command("census")(census_command)
    return made


def test_commands_from_checkpoint_to_census(app: typer.Typer, tmp_path: Path) -> None:
    flash, out = tmp_path / "flash", tmp_path / "out"
    _files().write_checkpoint(flash)
    run = CliRunner().invoke
    made = run(app, ["weights", str(flash), "--layer", "2", "--layer", "3", "--length", "300", "--out", str(out)])
    assert made.exit_code == 0, made.output
    assert "layer 2 (csa): 16 tensors read" in made.output
    shown = run(app, ["census", str(out)])
    assert shown.exit_code == 0, shown.output
    assert "capture:flash-layer-2" in shown.output
    assert "fp4 q and k" in shown.output
    lines = run(app, ["census", str(flash), "--layer", "4", "--length", "200", "--json"]).output.splitlines()
    assert [json.loads(line)["layer"] for line in lines] == [4]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["census", "nowhere"], "nowhere holds no capture"),
        (["weights", "nowhere"], "nowhere has no config.json"),
    ],
)
def test_bad_input_is_one_sentence(app: typer.Typer, words: list[str], message: str) -> None:
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert message in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_a_capture_of_every_kind_is_counted_once(app: typer.Typer, tmp_path: Path) -> None:
    for layer in (2, 3):
        case = Case(f"small-{layer}", "gaussian", (200,), rows=4, layers=(layer,), overrides=SMALL)
        Capture(case, generate(case, layer)).save(tmp_path / f"layer-{layer:02d}.safetensors")
    result = CliRunner().invoke(app, ["census", str(tmp_path), "--json"])
    assert [json.loads(line)["layer"] for line in result.output.splitlines()] == [2]
