import json

import pytest
from typer.testing import CliRunner

from difftest.mutants.cli import app


def run(*args):
    return CliRunner().invoke(app, list(args))


def test_list_shows_every_mutant_of_a_path():
    rows = json.loads(run("list", "--path", "bf16-k", "--json").stdout)
    assert {"mutant": "s2-payload-stride", "report": "S2", "stage": "index_k", "paths": "bf16-k"}.items() <= next(
        row for row in rows if row["mutant"] == "s2-payload-stride"
    ).items()
    assert all("bf16-k" in row["paths"] for row in rows)


def test_run_says_what_every_gate_says():
    made = run("run", "l1-no-head-factor")
    assert made.exit_code == 0, made.output
    lines = made.stdout.splitlines()
    assert lines[0].startswith("l1-no-head-factor (L1) in sglang-fp8-model, at head_weight: heads^-1/2 missing")
    assert "bug at head_weight" in lines[1]
    assert lines[-3].startswith("caught by: head_weight isolated excess, score accumulated uniform_scale")
    assert lines[-1] == "blame: bug at head_weight; head_weight 100% of score"


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["run", "l1-no-relus"], "unknown mutant 'l1-no-relus': did you mean l1-no-relu"),
        (["run", "s2-payload-stride"], "has no seed in sglang-fp8-model: choose --path bf16-k"),
        (["matrix", "--name", "nothing-like-it", "--check"], "unknown mutant"),
    ],
)
def test_bad_input_is_answered_in_a_sentence(args, says):
    made = run(*args)
    assert made.exit_code == 2 and says in made.stderr.replace("\n", " ")


def test_check_of_one_mutant_writes_nothing_and_passes(tmp_path):
    made = run("matrix", "--check", "--name", "l8-step-visibility", "--path", "sglang-fp8-model")
    assert made.exit_code == 0, made.output
    assert made.stdout.splitlines()[-1] == "1 of 1 caught, 1 named at the stage at fault"
