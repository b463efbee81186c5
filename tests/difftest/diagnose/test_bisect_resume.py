"""Interruption: nothing is left behind, nothing is run twice."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from difftest.diagnose.bisect import bisect_commits
from difftest.diagnose.ledger import STATE, Ledger
from difftest.diagnose.plans import CommitPlan, plan_from_json, plan_to_json
from difftest.diagnose.trial import Command, Refused

STARTED_WITHIN = 30.0
"""Seconds that a search may take to reach its third verdict on a busy machine."""


def counted(tmp_path):
    """A verdict command that notes every commit it is run for."""
    return f"echo $DIFFTEST_COMMIT >> {tmp_path}/asked; ! grep -q bug code.txt"


def plan_of(repo, line):
    return CommitPlan(repo.root, Command(line), good=repo.sha[1])


def test_a_resumed_search_runs_no_trial_twice(history, tmp_path, monkeypatch):
    repo = history.linear(64, 40)
    plan = plan_of(repo, counted(tmp_path))
    before, run, met = repo.state(), Command.run, []

    def interrupted(command, *arguments):
        met.append(arguments)
        if len(met) == 5:
            raise KeyboardInterrupt
        return run(command, *arguments)

    monkeypatch.setattr(Command, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bisect_commits(plan, Ledger.create(tmp_path / "run", plan_to_json(plan)))
    assert repo.state() == before
    assert len((tmp_path / "asked").read_text().splitlines()) == 4
    ledger = Ledger.open(tmp_path / "run")
    outcome = bisect_commits(plan_from_json(ledger.plan), ledger)
    assert outcome.culprit.sha == repo.sha[40]
    asked = (tmp_path / "asked").read_text().splitlines()
    again = {outcome.culprit.sha, *outcome.culprit.parents}
    assert all(asked.count(sha) == (2 if sha in again else 1) for sha in asked if ":" not in sha)


def test_endpoints_stay_those_of_the_start(history, tmp_path):
    repo = history.linear(16, 9)
    plan = plan_of(repo, "! grep -q bug code.txt")
    first = bisect_commits(plan, Ledger.create(tmp_path / "run", plan_to_json(plan)))
    subprocess.run(["git", "reset", "--quiet", "--hard", repo.sha[5]], cwd=repo.root, check=True)
    again = bisect_commits(plan, Ledger.open(tmp_path / "run"))
    assert (again.culprit, again.bad) == (first.culprit, repo.sha[16])


def start(repo, tmp_path, line):
    """The command line in a process of its own, once its verdict command has met three commits."""
    code = "import typer; from difftest.diagnose.bisect_cli import bisect_command as c; typer.run(c)"
    options = ["--repo", str(repo.root), "--good", repo.sha[1], "--out", str(tmp_path / "run"), "--", line]
    child = subprocess.Popen([sys.executable, "-c", code, *options], stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + STARTED_WITHIN
    while not (tmp_path / "waiting").exists():
        assert time.monotonic() < until
        assert child.poll() is None
        time.sleep(0.02)
    return child


def slow_third(tmp_path):
    """Notes its process id and hangs when it is run for the third time."""
    return (
        f"echo $$ >> {tmp_path}/asked; if test $(wc -l < {tmp_path}/asked) -eq 3; then "
        f"echo $$ > {tmp_path}/waiting; sleep 60; fi; ! grep -q bug code.txt"
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_verdict_too_and_says_how_to_go_on(history, tmp_path, number):
    repo = history.linear(32, 20)
    before = repo.state()
    child = start(repo, tmp_path, slow_third(tmp_path))
    child.send_signal(number)
    _, said = child.communicate(timeout=STARTED_WITHIN)
    assert child.returncode == 130
    assert "interrupted with 2 trials kept; the repository is as it was; go on with `difftest bisect --resume" in said
    assert repo.state() == before
    assert not (tmp_path / "run" / "tree").exists()
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "waiting").read_text()), 0)


def test_after_a_kill_the_next_search_clears_up_and_goes_on(history, tmp_path):
    repo = history.linear(32, 20)
    before = repo.state()
    child = start(repo, tmp_path, slow_third(tmp_path))
    child.kill()
    child.communicate(timeout=STARTED_WITHIN)
    os.killpg(int((tmp_path / "waiting").read_text()), signal.SIGKILL)
    assert "run/tree" in repo.state()
    ledger = Ledger.open(tmp_path / "run")
    assert bisect_commits(plan_from_json(ledger.plan), ledger).culprit.sha == repo.sha[20]
    assert repo.state() == before


def test_one_search_a_directory(tmp_path):
    ledger = Ledger.create(tmp_path / "run", {"kind": "commit"})
    with ledger.lock(), pytest.raises(Refused, match="another process is searching in"), ledger.lock():
        raise AssertionError("the lock was given twice")


def test_a_directory_of_another_search_is_refused(tmp_path):
    Ledger.create(tmp_path / "run", {"kind": "commit", "bad": "HEAD"})
    assert Ledger.create(tmp_path / "run", {"kind": "commit", "bad": "HEAD"}).trials == {}
    with pytest.raises(Refused, match="holds another bisection; go on with it by --resume"):
        Ledger.create(tmp_path / "run", {"kind": "commit", "bad": "HEAD~1"})
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    with pytest.raises(Refused, match="is not empty: a search never overwrites"):
        Ledger.create(tmp_path / "full", {})


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "holds no bisection: it has no state.json"),
        ("{", "is not the state of a bisection"),
        ("[]", "is not the state of a bisection"),
        (json.dumps({"schema": "difftest.bisect/0"}), "has schema 'difftest.bisect/0', this version reads"),
    ],
)
def test_broken_state_files(tmp_path, text, sentence):
    if text is not None:
        (tmp_path / STATE).write_text(text)
    with pytest.raises(Refused, match=sentence):
        Ledger.open(tmp_path)


def test_a_plan_survives_the_state_file(tmp_path):
    plan = CommitPlan(tmp_path, Command("x", True, 2.0, "score"), only=("a", "b"), repeat="always")
    assert plan_from_json(plan_to_json(plan)) == plan
    with pytest.raises(Refused, match="holds no plan of a bisection"):
        plan_from_json({"kind": "commit"})
