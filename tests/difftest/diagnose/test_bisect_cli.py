"""The `difftest bisect` command: its options, exit codes and one-sentence errors."""

import json

import pytest
import typer
from typer.testing import CliRunner

from difftest.diagnose import bisect_cli
from difftest.diagnose.ledger import Ledger

app = typer.Typer(pretty_exceptions_enable=False)
app.command()(bisect_cli.bisect_command)
STAGED = 'if grep -q bug code.txt; then echo \'{"stage": "score"}\'; exit 1; fi'


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_json_report_and_files(history, tmp_path):
    repo = history.linear(16, 11)
    out = tmp_path / "run"
    done = invoke("--repo", repo.root, "--good", repo.sha[1], "--out", out, "--json", "--", STAGED)
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert (report["culprit"]["sha"], report["stage"]) == (repo.sha[11], "score")
    assert json.loads((out / "bisect.json").read_text()) == report
    assert "first bad commit" in (out / "bisect.md").read_text()
    assert "search" in done.stderr


def test_the_terminal_report_ends_in_the_conclusion(history, tmp_path, monkeypatch):
    repo = history.linear(8, 5)
    monkeypatch.chdir(tmp_path)
    done = invoke("--repo", repo.root, "--good", repo.sha[1], "--", STAGED)
    lines = done.stdout.strip().splitlines()
    assert lines[-2].startswith(f"first bad commit: {repo.sha[5][:12]} 'change 5' by Ada Lovelace")
    assert lines[-2].endswith("which fails at score")
    assert lines[-1].startswith("report: runs/bisect-")
    resumed = invoke("--resume", lines[-1].split()[1].rsplit("/", 1)[0])
    assert resumed.stdout.strip().splitlines()[-2] == lines[-2]


def test_several_candidates_exit_125_and_an_abort_128(history, tmp_path):
    repo = history.linear(8, 5)
    many = invoke("--repo", repo.root, "--good", repo.sha[1], "--out", tmp_path / "a", "--stage", "kv", "--", STAGED)
    assert many.exit_code == 125
    assert "cannot be judged (fails at score, not at kv)" in many.stderr
    assert invoke("--repo", repo.root, "--out", tmp_path / "b", "--", "exit 129").exit_code == 128


def test_words_of_a_command_keep_their_quotes_and_fill_ins(history, tmp_path):
    repo = history.linear(8, 5)
    words = [
        "sh",
        "-c",
        'test "$1" = "two words" && test "$2" = seed=0 && ! grep -q bug code.txt',
        "x",
        "two words",
        "seed={seed}",
    ]
    done = invoke("--repo", repo.root, "--good", repo.sha[1], "--out", tmp_path / "run", "--json", "--", *words)
    assert json.loads(done.stdout)["culprit"]["sha"] == repo.sha[5]


def line_of(tmp_path, *options):
    """The verdict command that options amount to, read from the state file of a search that could not start."""
    invoke(*options, "--good", "nowhere", "--out", tmp_path / "run")
    return Ledger.open(tmp_path / "run").plan["command"]["line"]


def test_a_case_is_judged_by_difftest_run_with_the_interpreter_of_the_tree(history, tmp_path):
    repo = history.linear(2, 2)
    options = ("--repo", repo.root, "--case", "long context", "--path", "bf16-k:q=fp8", "--layer", 2)
    asked = "run --case 'long context' --path bf16-k:q=fp8 --layer 2 --seed {seed} --out {out} --keep none --json"
    assert line_of(tmp_path, *options) == "{python} -P -m difftest " + asked
    assert Ledger.open(tmp_path / "run").plan["command"]["usage_skips"] is True


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ((), "by exactly one of: a command after `--`, --case, or --bundle"),
        (("--case", "x", "--", "true"), "by exactly one of: a command after `--`, --case, or --bundle"),
        (("--bundle", "/no/such"), "--bundle /no/such does not exist"),
        (("--good-rate", "0.9", "--", "true"), "failure rates 0.9 (good) and 0.5 (bad) cannot be told apart"),
        (("--package", "x", "--good", "1", "--", "true"), "--package needs two released versions"),
        (
            ("--package", "x", "--good", "1", "--bad", "2", "--build", "make", "--", "true"),
            "--build and --only are about",
        ),
        (("--resume", "/no/such"), "holds no bisection"),
        (("--repo", "/no/such", "--", "true"), "is not a directory; give the root of a git checkout"),
        (("--", "true"), "is not in a git repository"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_2(tmp_path, monkeypatch, options, sentence):
    monkeypatch.chdir(tmp_path)
    done = invoke(*options)
    assert done.exit_code == 2
    assert sentence in done.stderr
    assert done.stderr.startswith("difftest bisect: ")
    assert len(done.stderr.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
