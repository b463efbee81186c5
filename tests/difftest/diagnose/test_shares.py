"""Shares, smallest sets and interactions of cost functions whose answers are known."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from difftest.diagnose.shares import MOST_PLAYERS, Interaction, shapley, share_out

NAMES = ["a", "b", "c", "d"]


def additive(weights):
    """The cost that each player not replaced adds."""
    return lambda replaced: sum(weight for name, weight in weights.items() if name not in replaced)


def test_additive_costs_give_every_player_its_own_share():
    made = share_out(NAMES, additive({"a": 6.0, "b": 3.0, "c": 1.0, "d": 0.0}))
    assert made.loss == 10
    assert made.alone == pytest.approx({"a": 0.6, "b": 0.3, "c": 0.1, "d": 0})
    assert made.last == pytest.approx(made.alone)
    assert made.shapley == pytest.approx({"a": 0.6, "b": 0.3, "c": 0.1})
    assert made.smallest == [frozenset("ab")] and made.remains == pytest.approx(0.1)
    assert made.interactions == []


def test_either_one_of_two_restores_what_both_spoil():
    """A product: the loss is there only while both faults are."""
    made = share_out(NAMES, lambda replaced: 0.0 if {"a", "b"} & replaced else 1.0)
    assert made.smallest == [frozenset("a"), frozenset("b")]
    assert made.shapley == pytest.approx({"a": 0.5, "b": 0.5})
    assert made.interactions == [Interaction(("a", "b"), -1.0)]


def test_a_pair_that_only_helps_together():
    """One-sided replacement makes it no better: a transform that both sides lack."""
    made = share_out(NAMES, lambda replaced: 0.0 if {"a", "b"} <= replaced else 1.0)
    assert made.alone["a"] == 0 and made.last["a"] == 1
    assert made.smallest == [frozenset("ab")]
    assert made.interactions == [Interaction(("a", "b"), 1.0)]


def test_a_pair_that_is_worse_apart():
    """Replacing one side only is far worse than replacing none."""
    cost = {frozenset(): 1.0, frozenset("a"): 40.0, frozenset("b"): 40.0, frozenset("ab"): 0.0}
    made = share_out(["a", "b"], lambda replaced: cost[replaced])
    assert made.alone == {"a": -39, "b": -39} and made.shapley == pytest.approx({"a": 0.5, "b": 0.5})
    assert made.smallest == [frozenset("ab")]


def test_nothing_is_lost():
    made = share_out(NAMES, lambda replaced: 0.0)
    assert (made.loss, made.alone, made.smallest) == (0, {}, [])


def test_of_many_players_only_the_most_influential_are_mixed():
    weights = {f"p{number}": float(number) for number in range(1, 12)}
    asked = set()

    def cost(replaced):
        asked.add(replaced)
        return additive(weights)(replaced)

    made = share_out(list(weights), cost)
    assert len(made.shapley) == MOST_PLAYERS and "p11" in made.shapley and "p1" not in made.shapley
    assert len(asked) <= 2**MOST_PLAYERS + 2 * len(weights) + 2


@settings(deadline=None, max_examples=20)
@given(costs=st.lists(st.floats(0, 10), min_size=8, max_size=8))
def test_shapley_values_add_up_and_ignore_who_does_nothing(costs):
    """Efficiency and the null player, for any cost of three players; the fourth changes nothing."""
    sets = [frozenset(name for bit, name in enumerate("abc") if number >> bit & 1) for number in range(8)]
    table = dict(zip(sets, costs, strict=True))
    values = shapley(NAMES, lambda replaced: table[replaced - {"d"}])
    assert sum(values.values()) == pytest.approx(table[frozenset()] - table[frozenset("abc")], abs=1e-9)
    assert values["d"] == pytest.approx(0, abs=1e-12)
