"""Verdicts that do not always come out the same: repeated until a sequential test decides."""

import pytest

from difftest.diagnose.sequential import SequentialTest
from difftest.diagnose.trial import CannotJudge

SOMETIMES = "! { grep -q bug code.txt && test $(( ({seed} * 3 + 3) % 10 )) -ge 4; }"
"""Passes on good commits; on bad ones fails for 6 seeds of 10, of which seed 0 is not one."""


def repository(history, commits, bug_at):
    for number in range(1, commits + 1):
        text = {"code.txt": "bug\n" if number >= bug_at else "fine\n"}
        history.commit(f"change {number}", {"n": f"{number}\n"} if number not in (1, bug_at) else text)
    return history.write()


def test_seeds_are_repeated_and_the_certainty_stated(history, search, tmp_path):
    repo = repository(history, 40, 27)
    outcome = search(repo, tmp_path / "run", SOMETIMES, good=repo.sha[1], repeat="always")
    assert outcome.culprit.sha == repo.sha[27]
    assert outcome.exit_code == 0
    assert "sequential test between failure rates 0.05 and 0.5" in outcome.test
    assert all("of" in step.words for step in outcome.steps)


def test_a_flaky_verdict_is_noticed_and_repeated_from_then_on(history, search, tmp_path):
    repo = repository(history, 24, 9)
    said = []
    outcome = search(repo, tmp_path / "run", SOMETIMES, good=repo.sha[1], say=said.append)
    assert outcome.culprit.sha == repo.sha[9]
    assert any("failed 1 of 2 times: from here on seeds are repeated" in line for line in said)


def test_never_repeat_says_the_rate_instead(history, search, tmp_path):
    repo = repository(history, 24, 9)
    with pytest.raises(CannotJudge, match="failed 1 of 2 times; the verdict is flaky"):
        search(repo, tmp_path / "run", SOMETIMES, good=repo.sha[1], repeat="never")


def test_a_culprit_that_passes_its_confirmation_counts_as_flaky(history, search, tmp_path):
    """The verdict fails the first three times it meets the bug, then passes: the confirmation contradicts it."""
    repo = repository(history, 8, 5)
    counter = tmp_path / "met"
    line = f"! grep -q bug code.txt || {{ echo >> {counter}; test $(wc -l < {counter}) -gt 3; }}"
    said = []
    with pytest.raises(CannotJudge):
        search(repo, tmp_path / "run", line, good=repo.sha[1], say=said.append)
    assert any("was bad and then good: from here on seeds are repeated" in line for line in said)


def test_a_rate_between_the_two_cannot_be_judged(history, search, tmp_path):
    repo = repository(history, 8, 5)
    with pytest.raises(CannotJudge, match=r"still open after 6 trials: fails between the rates 0.5 and 0.7"):
        test = SequentialTest(good_rate=0.5, bad_rate=0.7, limit=6)
        search(repo, tmp_path / "run", SOMETIMES, good=repo.sha[1], repeat="always", test=test)
