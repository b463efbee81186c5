"""Bundles: what is in one, that it reads back, that a broken one is refused in a sentence, and its script."""

import ast
import json
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from difftest.cases.case import Case
from difftest.cases.generate import generate

from difftest.capture import input_tensors, load_capture
from difftest.diagnose import bundle as bundles
from difftest.diagnose.replay import Unavailable, replay
from difftest.diagnose.repro import PAGE, maker
from difftest.diagnose.shrink import shrink
from difftest.paths.base import get_path
from difftest.policy import load_policy
from difftest.record import read_records
from difftest.trace import Trace
from difftest.verdict import judge

CASE = Case("bundle-me", "gaussian", (271, 131), "decode", decode_tokens=3, overrides={"index_topk": 16})
CLEAN = "sglang-fp8-model"


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def made(faulty, tmp_path_factory):
    """Writes the bundle of a faulty path, once each."""
    torch.set_num_threads(1)
    written = {}

    def make(name, policy="default"):
        if (name, policy) not in written:
            path = get_path(name)
            found = shrink(path, generate(CASE, 2), CASE.id, load_policy(policy), seconds=5.0)
            folder = tmp_path_factory.mktemp("bundles") / name
            written[name, policy] = found, bundles.write(folder, found, path, bundles.Origin(CASE, 2, name, policy))
        return written[name, policy]

    return make


@pytest.fixture
def copy(made, tmp_path):
    """A copy of a bundle, to be damaged."""
    return Path(shutil.copytree(made("loses-last")[1], tmp_path / "copy"))


def test_a_bundle_holds_what_its_docstring_lists(made):
    _, folder = made("loses-last")
    assert sorted(file.name for file in folder.iterdir()) == [
        "bundle.json",
        "config.json",
        "expected.safetensors",
        "got.safetensors",
        "inputs.safetensors",
        "passing.safetensors",
        "records.jsonl",
        "repro.py",
    ]
    facts = json.loads((folder / "bundle.json").read_text())
    assert Case.from_json(json.dumps(facts["recipe"])) == CASE
    assert torch.__version__.startswith(facts["environment"]["torch"])
    assert facts["sizes"]["entries"] == [99, 2]
    assert facts["signature"] == {"stage": "topk", "comparison": "isolated", "rule": "order", "sign": ""}


def test_a_bundle_reads_back(made):
    found, folder = made("no-relu")
    read = bundles.load(folder)
    assert read.signature == found.signature and read.path == "no-relu"
    for mine, theirs in ((read.inputs, found.smallest.inputs), (read.passing, found.neighbour.inputs)):
        for name, tensor in input_tensors(theirs).items():
            assert torch.equal(input_tensors(mine)[name], tensor), name
    assert read.inputs.config == found.smallest.inputs.config


def test_other_tools_read_its_files(made):
    """Inputs are a capture, got is a trace, records can be judged again."""
    found, folder = made("no-relu")
    [(case, inputs)] = load_capture(f"capture:{folder / 'inputs.safetensors'}")
    assert case.id == "bundle-me.shrunk" and inputs.lengths == found.smallest.inputs.lengths
    trace = Trace.load(folder / "got.safetensors")
    assert list(trace.stages)[-1] == "score" and torch.equal(trace.value("score"), found.smallest.trace.value("score"))
    records = read_records(folder / "records.jsonl")
    assert judge(records, load_policy("default"))[0].headline == "bug at score"


def test_a_bundle_never_overwrites(made):
    found, folder = made("no-relu")
    with pytest.raises(FileExistsError, match="is not empty: a bundle never overwrites"):
        bundles.write(folder, found, get_path("no-relu"), bundles.Origin(CASE, 2, "no-relu"))


def test_replay_fails_the_same_way_and_another_path_agrees(made):
    _, folder = made("loses-last")
    read = bundles.load(folder)
    again = replay(read)
    assert again.same and again.exit_code == 1
    assert "the recorded failure: topk order" in again.text() and "run again" not in again.text()
    other = replay(read, CLEAN)
    assert other.exit_code == 0 and not other.same
    assert other.text().endswith("the recorded failure does not appear: topk order")
    assert replay(read, passing=True).exit_code == 0
    wrong = replay(read, "no-hadamard")
    assert wrong.exit_code == 1 and not wrong.same and "another failure than the recorded one" in wrong.sentence()


def test_a_policy_of_ones_own_travels_with_the_bundle(made, tmp_path):
    own = tmp_path / "own.toml"
    own.write_text('name = "own"\n[isolated]\nexcess = 3.0\n')
    _, folder = made("no-relu", str(own))
    own.unlink()
    assert bundles.load(folder).policy().isolated == {"excess": 3.0}


def damage(folder, name):
    file = folder / "inputs.safetensors"
    if name == "cut short":
        file.write_bytes(file.read_bytes()[:-100])
    elif name == "changed":
        raw = bytearray(file.read_bytes())
        raw[-1] ^= 1
        file.write_bytes(raw)
    elif name == "missing":
        file.unlink()
    elif name == "foreign":
        (folder / "bundle.json").unlink()
    elif name == "not JSON":
        (folder / "bundle.json").write_text((folder / "bundle.json").read_text()[:200])
    else:
        facts = json.loads((folder / "bundle.json").read_text())
        if name == "other schema":
            facts["schema"] = "difftest.bundle/9"
        elif name == "no path":
            del facts["path"]
        elif name == "outside":
            facts["files"]["../../secret"] = {"bytes": 1, "sha256": ""}
        elif name == "odd stage":
            facts["signature"]["stage"] = "logits"
        (folder / "bundle.json").write_text(json.dumps(facts))


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("cut short", r"inputs.safetensors has \d+ bytes of \d+; copy the bundle again"),
        ("changed", "inputs.safetensors has other contents than when written; copy the bundle again"),
        ("missing", "is not whole: inputs.safetensors is missing; copy the bundle again"),
        ("foreign", "is no bundle: it has no bundle.json; give a directory that `difftest shrink` wrote"),
        ("not JSON", "bundle.json is not a bundle's manifest: "),
        ("other schema", "its schema is 'difftest.bundle/9', and this version reads 'difftest.bundle/1'"),
        ("no path", "it names no path"),
        ("outside", "lists '../../secret', which is no file of a bundle"),
        ("odd stage", "no failure is at stage 'logits'"),
    ],
)
def test_a_broken_bundle_is_refused_in_one_sentence(copy, name, sentence):
    damage(copy, name)
    with pytest.raises(ValueError, match=sentence) as error:
        bundles.load(copy)
    assert "\n" not in str(error.value)


def test_reading_executes_nothing(copy):
    """A script with other contents is refused by its checksum, and one that fits is not run either."""
    script = copy / "repro.py"
    script.write_text("raise SystemExit('ran')\n")
    with pytest.raises(ValueError, match=r"repro.py has \d+ bytes of \d+"):
        bundles.load(copy)
    facts = json.loads((copy / "bundle.json").read_text())
    facts["files"]["repro.py"] = bundles.checksum(script)
    (copy / "bundle.json").write_text(json.dumps(facts))
    assert replay(bundles.load(copy)).exit_code == 1


def test_a_path_that_does_not_load_cannot_be_judged(copy, tmp_path, monkeypatch):
    info = tmp_path / "broken.egg-info"
    info.mkdir()
    (info / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[difftest.paths]\nbroken = broken_module:Broken\n")
    (tmp_path / "broken_module.py").write_text("import no_such_module\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(Unavailable, match="path broken cannot be loaded: ModuleNotFoundError: No module named"):
        replay(bundles.load(copy), "broken")
    with pytest.raises(ValueError, match="unknown path 'nowhere'"):
        replay(bundles.load(copy), "nowhere")


def run_script(file, capsys):
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(file), run_name="__main__")
    return int(ended.value.code or 0), capsys.readouterr().out.strip()


def with_clean_path(folder, to):
    """The bundle's script with the path's import replaced by that of the path without the fault."""
    shutil.copytree(folder, to)
    text = (to / "repro.py").read_text()
    kind = next(line for line in text.splitlines() if line.startswith("from faulty_paths import")).split()[-1]
    text = text.replace(
        f"from faulty_paths import {kind}", "from difftest.paths.sglang_fp8_model import SglangFp8Model"
    )
    (to / "repro.py").write_text(text.replace(f"{kind}()", "SglangFp8Model()"))
    return to / "repro.py"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("bias-phase", "compressed: disagrees, value(0, "),
        ("no-hadamard", "index_k: disagrees, "),
        ("no-relu", "score: disagrees, value(0, 0): got "),
        ("loses-last", "topk: disagrees, row 0 selects ["),
        ("second-request-crashes", "score: disagrees, RuntimeError: illegal access of request 1"),
        ("no-sink", "attention: disagrees, value(0, 0, "),
    ],
)
def test_the_script_judges_like_the_bundle(made, tmp_path, capsys, name, says):
    _, folder = made(name)
    code, printed = run_script(folder / "repro.py", capsys)
    assert code == 1 and printed.startswith(says)
    assert run_script(with_clean_path(folder, tmp_path / "clean"), capsys) == (0, f"{printed.split(':')[0]}: agrees")


@pytest.mark.parametrize("name", ["no-hadamard", "loses-last"])
def test_the_script_is_a_page_that_imports_torch_and_the_path(made, name):
    _, folder = made(name)
    text = (folder / "repro.py").read_text()
    assert len(text.splitlines()) <= PAGE and max(map(len, text.splitlines())) <= 120
    found = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = {
        name
        for node in found
        for name in ([node.module] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names])
    }
    assert {name for name in modules if name.split(".")[0] not in sys.stdlib_module_names} == {"torch", "faulty_paths"}


def test_the_script_runs_from_anywhere(made, tmp_path):
    _, folder = made("loses-last")
    done = subprocess.run([sys.executable, folder / "repro.py"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "") and done.stdout.startswith("topk: disagrees")


def test_how_a_script_makes_the_path(faulty):
    assert maker(get_path("bf16-k:q=fp8"), "bf16-k:q=fp8") == (
        "from difftest.paths.bf16_k import Bf16K",
        "Bf16K(q='fp8')",
    )

    class Own(type(get_path(CLEAN))):
        pass

    assert maker(Own(), "") is None
    assert maker(Own(), CLEAN) == ("from difftest.paths.base import get_path", f"get_path({CLEAN!r})")
