"""The command `difftest blame`, and switches tried in processes of their own."""

import json
import shutil

import pytest
import torch
import typer
from difftest.cases.case import Case
from typer.testing import CliRunner

from difftest.diagnose.blame_cli import blame_command
from difftest.diagnose.ddmin import decide
from difftest.diagnose.switches import Trial, Trials, parse

app = typer.Typer()
app.command()(blame_command)

SMALL = {"index_topk": 16, "num_attention_heads": 1, "sliding_window": 8}
CASE = Case("switch-me", "gaussian", (121,), rows=2, layers=(2,), overrides=SMALL)

PATCH = """
from difftest.paths.sglang_fp8_model import SglangFp8Model

def apply():
    SglangFp8Model.activate = lambda self, product: product
"""


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def run(*args):
    return CliRunner().invoke(app, list(args))


def verdict(answer, stage=None):
    return Trial(({"answer": answer, "stage": stage, "text": f"{answer} at {stage}"},))


class Staged(Trials):
    """Trials whose outcomes are given: `outcomes(set of switch texts) -> Trial`."""

    def __init__(self, texts, outcomes):
        super().__init__(CASE, "bf16-k", [parse(text) for text in texts])
        self._outcomes = outcomes

    def _run(self, on):
        return self._outcomes({switch.text for switch in on})


def test_a_bug_is_told_with_its_table_and_exit_code_1():
    made = run("gaussian-2117", "--path", "mutant:of=sglang-fp8-model,name=n3-last-token", "--layer", "2")
    assert made.exit_code == 1, made.output
    lines = made.stdout.splitlines()
    assert lines[0].split("against oracle: ")[1].startswith("bug at index_k")
    assert any(line.split()[:3] == ["index_k", "FAILS", "excess"] for line in lines)
    assert any(line.startswith("  smallest set that restores it: index_k") for line in lines)


def test_a_passing_case_is_nothing_to_blame_in_words_and_in_json():
    made = run("gaussian-2117", "--path", "oracle", "--layer", "2", "--json")
    assert made.exit_code == 0, made.output
    told = json.loads(made.stdout)
    assert told["first_layer"] is None and told["layers"][0]["answer"] == "nothing to blame"


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["gaussian-2118", "--path", "oracle"], 2, "unknown case 'gaussian-2118': did you mean gaussian-2117"),
        (["gaussian-2117", "--path", "orakel"], 2, "unknown path 'orakel': did you mean oracle"),
        (["gaussian-2117", "--path", "mutant"], 125, "cannot run here: no mutant is named"),
        (["gaussian-2117", "--path", "sglang-fp8@recorded"], 125, "has nothing to say about gaussian-2117"),
        (["gaussian-2117", "--path", "oracle", "--switch", "1+1"], 2, "switch '1+1' is none of NAME=VALUE"),
        (["gaussian-2117", "--path", "oracle", "--trace", "nowhere"], 2, "nowhere is not a run directory"),
    ],
)
def test_bad_input_is_answered_in_a_sentence(args, code, says):
    made = run(*args)
    assert made.exit_code == code and says in made.stderr.replace("\n", " ")


def test_switches_have_four_forms():
    kinds = [parse(text).kind for text in ("FLAG=1", "case.index_topk=1024", "path.q=fp8", "patches.rope:apply")]
    assert kinds == ["environment", "case", "path", "callable"]
    assert parse("URL=a=b:c").value == "a=b:c"


def test_a_patch_is_found_among_switches(tmp_path, monkeypatch):
    """A process each: no switch, the patch."""
    (tmp_path / "broken_patch.py").write_text(PATCH)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    trials = Trials(CASE, "sglang-fp8-model", [parse("broken_patch:apply")], policy="exploratory")
    made = decide(list(trials.switches), trials.outcome)
    assert trials.trial(frozenset()).signature == ("agrees", "")
    assert trials.trial(frozenset({"broken_patch:apply"})).signature == ("bug", "score")
    assert made.direction == "cause" and made.sets == (("broken_patch:apply",),)


def test_a_trial_that_breaks_says_how(monkeypatch):
    monkeypatch.setattr("difftest.diagnose.switches.sys.executable", shutil.which("false"))
    broken = Trials(CASE, "sglang-fp8-model", [parse("FLAG=1")]).trial(frozenset({"FLAG=1"}))
    assert broken.signature == ("cannot judge", "") and broken.why == "exit code 1: no output"


def test_another_stage_is_another_failure():
    stages = {"A=1": "index_k", "B=1": "score"}

    def outcomes(on):
        return verdict("bug", stages[min(on)]) if on else verdict("agrees")

    trials = Staged(list(stages), outcomes)
    made = decide(list(stages), trials.outcome)
    assert made.sets == (("A=1",),) and made.alone["B=1"] == "other"


def test_a_cure_is_judged_by_the_failure_without_it():
    trials = Staged(["case.index_topk=1024"], lambda on: verdict("agrees") if on else verdict("explained", "index_k"))
    made = decide(list(trials.switches), trials.outcome)
    assert made.direction == "cure" and made.sentences() == ["passes with case.index_topk=1024"]
