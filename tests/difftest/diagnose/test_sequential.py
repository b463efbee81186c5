"""Wald's test keeps its promised error rates and says when a question stays open."""

import numpy as np
import pytest

from difftest.diagnose.sequential import SequentialTest


def walk(test, failures):
    """Decision and number of trials for a sequence of outcomes (True fails)."""
    failed = passed = 0
    for count, failure in enumerate(failures, 1):
        failed, passed = failed + bool(failure), passed + (not failure)
        decision = test.decide(failed, passed)
        if decision != "more":
            return decision, count
    raise AssertionError("no decision within the limit")


@pytest.mark.parametrize(("rate", "right", "wrong"), [(0.1, "good", "bad"), (0.5, "bad", "good")])
def test_error_rates_hold_at_the_two_rates(rate, right, wrong):
    """2,000 walks at an error probability of 0.02: 64 errors lie 3.8 standard deviations above the mean of 40."""
    test = SequentialTest(good_rate=0.1, bad_rate=0.5, alpha=0.02, beta=0.02, limit=400)
    draws = np.random.default_rng(7).random((2000, test.limit)) < rate
    decisions = [walk(test, row)[0] for row in draws]
    assert decisions.count(wrong) <= 64
    assert decisions.count(right) >= 1900


def test_a_clear_verdict_needs_few_trials():
    test = SequentialTest()
    assert walk(test, [True] * 9) == ("bad", 3)
    assert walk(test, [False] * 20) == ("good", 11)


def test_a_rate_between_the_two_stays_open():
    test = SequentialTest(good_rate=0.1, bad_rate=0.4, alpha=0.001, beta=0.001, limit=12)
    assert walk(test, [True, False, False, False] * 5) == ("undecided", 12)


def test_impossible_outcomes_decide_at_once():
    assert SequentialTest(good_rate=0.0).decide(1, 40) == "bad"
    assert SequentialTest(bad_rate=1.0).decide(5, 1) == "good"
    assert SequentialTest(good_rate=0.0).decide(0, 9) == "more"


def test_the_promise_is_stated_for_all_verdicts_together():
    assert "some of 10 verdicts wrong: at most 0.01" in SequentialTest().sentence(10)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"good_rate": 0.5, "bad_rate": 0.5}, "failure rates 0.5 .good. and 0.5 .bad. cannot be told apart"),
        ({"good_rate": -0.1}, "cannot be told apart"),
        ({"alpha": 0.0}, "alpha 0 is not an error probability"),
        ({"beta": 0.7}, "beta 0.7 is not an error probability"),
        ({"limit": 0}, "a limit of 0 trials"),
    ],
)
def test_bad_settings(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        SequentialTest(**options)
