"""`difftest shrink` and `difftest replay` as a user types them, and `difftest bisect` with a bundle as its oracle."""

import json
import os
import re

import pytest
import torch
from typer.testing import CliRunner

from difftest.cli import app
from difftest.diagnose import bundle as bundles
from difftest.diagnose.ledger import Ledger

CASE = "short-257"


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def difftest(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture(scope="module")
def bundle(faulty, tmp_path_factory):
    """A bundle as the command writes it, and what the command printed."""
    folder = tmp_path_factory.mktemp("cli") / "bundle"
    done = difftest("shrink", CASE, "--path", "no-relu", "--layer", "14", "--out", folder)
    assert done.exit_code == 1, done.output
    return folder, done.output


def test_shrink_says_what_became_smaller_and_what_to_do(bundle):
    folder, said = bundle
    assert said.startswith("short-257 layer 14 sglang-fp8-model: bug at score: ")
    assert re.search(r"  entries +65  -> +1\n", said) and re.search(r"  index heads +64  -> +1\n", said)
    assert "same failure (score excess, got " in said and "passes with one change: " in said
    assert f"run again: difftest replay {folder}" in said
    assert f"python {folder / 'repro.py'}" in said


def test_shrink_of_a_default_case_meets_the_target(faulty, tmp_path):
    done = difftest("shrink", "gaussian-2117", "--path", "loses-last", "--out", tmp_path / "b", "--json")
    facts = json.loads(done.output)
    assert done.exit_code == 1 and facts["finished"] and facts["layer"] == 2
    assert facts["sizes"]["entries"] == [529, 2] and facts["sizes"]["index heads"] == [64, 1]


def test_a_bundle_shrinks_further_under_its_own_path(bundle, tmp_path):
    folder, _ = bundle
    done = difftest("shrink", folder, "--out", tmp_path / "again")
    assert done.exit_code == 1
    assert bundles.load(tmp_path / "again").signature == bundles.load(folder).signature


def test_replay_and_its_exit_codes(bundle):
    folder, _ = bundle
    again = difftest("replay", folder)
    assert again.exit_code == 1 and "the recorded failure: score excess" in again.output
    assert "no-relu" not in again.output.splitlines()[-1]
    other = difftest("replay", folder, "--path", "sglang-fp8-model")
    assert other.exit_code == 0 and "the recorded failure does not appear" in other.output
    assert difftest("replay", folder, "--passing").exit_code == 0
    as_json = difftest("replay", folder, "--json")
    facts = json.loads(as_json.output)
    assert (facts["exit_code"], facts["same_failure"], facts["verdicts"][0]["stage"]) == (1, True, "score")
    unknown = difftest("replay", folder, "--path", "no-rely")
    assert unknown.exit_code == 2 and "did you mean" in unknown.output
    nowhere = difftest("replay", folder.parent)
    assert nowhere.exit_code == 2 and "is no bundle" in nowhere.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="the path is available where there is a GPU")
def test_a_path_that_cannot_run_here_cannot_judge(bundle):
    folder, _ = bundle
    done = difftest("replay", folder, "--path", "bf16-k:store=cuda")
    assert done.exit_code == 125 and "needs a CUDA device" in done.output
    done = difftest("shrink", CASE, "--path", "bf16-k:store=cuda")
    assert done.exit_code == 125


def test_shrink_with_nothing_to_shrink(tmp_path):
    done = difftest("shrink", CASE, "--path", "sglang-fp8-model", "--layer", "2", "--out", tmp_path / "b")
    assert done.exit_code == 0 and "nothing to shrink: short-257 layer 2 sglang-fp8-model: agrees" in done.output
    assert not (tmp_path / "b").exists()


def test_shrink_of_a_flaky_failure(faulty, tmp_path):
    done = difftest("shrink", CASE, "--path", "flaky", "--layer", "2", "--out", tmp_path / "b", "--seconds", 9)
    assert done.exit_code == 125
    assert re.search(r"on equal inputs \d+ of \d+ runs failed with score excess.*; stopped shrinking", done.output)
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("gausian-2117", "--path", "no-relu"), "did you mean gaussian-2117"),
        ((CASE,), "name the path that fails with --path"),
        ((CASE, "--path", "no-rely"), "did you mean no-relu"),
        ((CASE, "--path", "no-relu", "--layer", "3"), "layer 3 is hca and case short-257 is for csa layers"),
        ((CASE, "--path", "no-relu", "--policy", "harsh"), "unknown policy 'harsh'"),
        ((CASE, "--path", "no-relu", "--out", "."), ". is not empty: a bundle never overwrites"),
        (("capture:/no/such", "--path", "no-relu"), "holds no capture"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_2(faulty, words, sentence):
    done = difftest("shrink", *words)
    assert done.exit_code == 2 and sentence in done.output, done.output


KERNEL = """
from difftest.paths.sglang_fp8_model import SglangFp8Model


class Kernel(SglangFp8Model):
    def activate(self, product):
        return {activate}
"""


def test_bisect_takes_a_bundle(bundle, history, tmp_path, monkeypatch):
    """The repository's own path, found through an entry point in the tree, from the commit that broke it."""
    folder, _ = bundle
    files = {
        "kernel.egg-info/PKG-INFO": "Metadata-Version: 2.1\nName: kernel\nVersion: 1\n",
        "kernel.egg-info/entry_points.txt": "[difftest.paths]\nkernel = kernel:Kernel\n",
        "kernel.py": KERNEL.format(activate="product.relu_()"),
    }
    history.commit("kernel", files)
    history.commit("activation by hand", {"kernel.py": KERNEL.format(activate="product")})
    repo = history.write()
    run = tmp_path / "run"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(run / "tree"), os.environ["PYTHONPATH"]]))
    words = ("--repo", repo.root, "--bundle", folder, "--path", "kernel", "--good", "HEAD~1", "--out", run, "--json")
    done = difftest("bisect", *words)
    report = json.loads(done.output[done.output.index("{") :])
    assert done.exit_code == 0, done.output
    assert report["culprit"]["sha"] == repo.sha[2] and report["stage"] == "score" and report["confirmed"]
    command = Ledger.open(run).plan["command"]
    assert command["stage"] == "score" and command["line"].endswith(f"replay {folder} --path kernel --json")


def test_bisect_refuses_a_broken_bundle(history, tmp_path):
    repo = history.linear(2, 2)
    (tmp_path / "broken").mkdir()
    done = difftest("bisect", "--repo", repo.root, "--bundle", tmp_path / "broken")
    assert done.exit_code == 2 and "is no bundle: it has no bundle.json" in done.output
