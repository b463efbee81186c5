"""Delta debugging finds the switches that decide, alone, together or one of several."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from difftest.diagnose.ddmin import ddmin, decide

NAMES = [f"s{number}" for number in range(8)]


def fails_if(condition):
    return lambda on: "fails" if condition(on) else "passes"


def test_one_switch_is_the_cause():
    made = decide(NAMES, fails_if(lambda on: "s5" in on))
    assert made.direction == "cause" and made.sets == (("s5",),)
    assert made.alone["s5"] == "fails" and made.without["s5"] == "passes"
    assert made.sentences() == ["fails with s5"]


def test_two_switches_only_together():
    made = decide(NAMES, fails_if(lambda on: {"s1", "s6"} <= on))
    assert made.sets == (("s1", "s6"),)
    assert made.sentences() == ["fails with s1 + s6 (interaction: only together; s1, s6 alone do not)"]


def test_either_of_two_is_enough():
    made = decide(NAMES, fails_if(lambda on: "s0" in on or {"s2", "s3"} <= on))
    assert made.sets == (("s0",), ("s2", "s3"))
    assert made.sentences()[-1] == "interaction: any one of these 2 sets is enough"


def test_a_cure_is_told_from_a_cause():
    made = decide(NAMES, fails_if(lambda on: "s4" not in on))
    assert made.direction == "cure" and made.sentences() == ["passes with s4"]


def test_a_switch_that_undoes_another():
    """s0 breaks it, s1 repairs that: with both on it passes, and without s1 it does not."""
    made = decide(["s0", "s1", "s2"], fails_if(lambda on: "s2" not in on or ("s0" in on and "s1" not in on)))
    assert made.direction == "cure" and made.sets == (("s2",),)
    assert made.sentences() == [
        "passes with s2",
        "interaction: s1 undoes another: with all on but it, the case fails",
    ]


@pytest.mark.parametrize("outcome", ["passes", "fails"])
def test_switches_that_decide_nothing(outcome):
    made = decide(NAMES, lambda on: outcome)
    assert made.direction is None and made.sets == ()
    assert "the switches do not decide it" in made.sentences()[0]


def test_another_failure_is_not_the_one_looked_for():
    made = decide(["a", "b"], lambda on: "passes" if not on else "fails" if "a" in on else "other")
    assert made.sets == (("a",),) and made.alone["b"] == "other"


@settings(deadline=None, max_examples=25)
@given(wanted=st.sets(st.sampled_from(NAMES), min_size=1, max_size=4))
def test_a_single_minimal_set_is_found_whatever_it_is(wanted):
    tries = []

    def holds(on):
        tries.append(on)
        return wanted <= on

    assert set(ddmin(NAMES, holds)) == wanted
    assert len(tries) <= len(NAMES) ** 2 + 3 * len(NAMES)
    assert decide(NAMES, fails_if(lambda on: wanted <= on)).sets == (tuple(sorted(wanted)),)
