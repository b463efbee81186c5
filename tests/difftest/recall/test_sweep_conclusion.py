"""Curves and the conclusion: computed from the cells, so that other cells give another conclusion."""

from dataclasses import replace

import pytest

from difftest.recall.conclusion import conclusion
from difftest.recall.curves import Curve, crossing, curves, falling, wilson
from difftest.recall.sweep_cell import Cell, Score

LENGTHS = (1000, 3611, 4509, 5294, 8000, 10498, 16384, 22597)
TRIALS = 40


def cells(
    variant: str, recall: dict[int, float], group: str = "formats", k: int = 512, margin: float = 0.1
) -> list[Cell]:
    """`TRIALS` needles a length, the first `recall` of them found; lengths left out are found whole."""
    made = []
    for length in LENGTHS:
        visible = length // 4
        for trial in range(TRIALS):
            found = trial < round(TRIALS * recall.get(length, 1.0)) or visible <= k
            own = margin if visible > k else None
            score = Score(found, 1 if found else 700, own, 6.0, 0.7, 0.1, 0.9, 0.1)
            made.append(Cell("gaussian", 2, trial, variant, group, k, length, 0.5, visible // 2, visible, score))
    return made


def random_choice(k: int = 512) -> dict[int, float]:
    return {length: min(1.0, 4 * k / length) for length in LENGTHS}


def only(made: list[Cell]) -> Curve:
    (curve,) = curves(made)
    return curve


def said(*made: list[Cell]) -> str:
    flat = [cell for part in made for cell in part]
    return "\n".join(conclusion(curves(flat), flat))


@pytest.mark.parametrize(
    ("recall", "k", "shape"),
    [
        ({}, 512, "no loss"),
        ({22597: 0.95}, 512, "rare loss"),
        ({8000: 0.9, 10498: 0.85, 16384: 0.7, 22597: 0.6}, 512, "loss, no cliff"),
        (random_choice(), 512, "cliff near 4.5k"),
        (dict.fromkeys(LENGTHS[3:], 0.0), 512, "cliff near 4.5k"),
        (random_choice(1024), 1024, "cliff elsewhere"),
        ({16384: 0.1, 22597: 0.0}, 512, "cliff elsewhere"),
    ],
)
def test_shapes(recall: dict[int, float], k: int, shape: str) -> None:
    assert only(cells("x", recall, k=k)).shape == shape


def test_a_random_choice_is_told_from_a_poor_one() -> None:
    assert only(cells("x", random_choice())).at_chance
    assert not only(cells("x", dict.fromkeys(LENGTHS[1:], 0.6))).at_chance


def test_lengths_that_exercise_no_selection_count_for_nothing() -> None:
    curve = only(cells("x", {}, k=8192))
    assert curve.shape == "not exercised" and curve.total == 0
    assert "cannot be judged" in said(cells("fp8 q and K", {}, k=8192))


def test_the_conclusion_turns_with_the_data() -> None:
    fine, broken = cells("fp8 q and K", {}), cells("fp8 q and K", random_choice())
    assert "fp8 alone does not produce a cliff near 4.5k** (fp8 q and K)" in said(fine)
    assert "fp8 alone does produce a cliff near 4.5k** (fp8 q and K)" in said(broken)
    assert "no better than chance" in said(broken) and "no better than chance" not in said(fine)


def test_the_conclusion_names_what_falls_and_what_does_not() -> None:
    text = said(cells("Hadamard on q only", random_choice(), "hadamard"), cells("bf16 q and K", {}))
    cliff = next(line for line in text.splitlines() if line.startswith("- A cliff near 4.5k"))
    whole = next(line for line in text.splitlines() if line.startswith("- No loss at all"))
    assert "Hadamard on q only" in cliff and "bf16 q and K" not in cliff
    assert "bf16 q and K" in whole and "Hadamard" not in whole
    assert "fp8 alone**: not swept" in text


def test_an_fp8_loss_without_a_cliff_is_said() -> None:
    text = said(cells("fp8 q and K", {10498: 0.8, 16384: 0.7, 22597: 0.6}))
    assert "does not produce a cliff" in text
    assert "lose needles, without a cliff: gaussian with k 512 (recall 0.60" in text


def test_losses_beyond_the_bound_are_not_blamed_on_the_format() -> None:
    within = said(cells("mine", {22597: 0.5}, "path", margin=0.4))
    beyond = said(cells("mine", {22597: 0.5}, "path", margin=2.5))
    assert "lay within their formats' error bounds" in within
    assert "Not explained by number formats" in beyond and "mine" in beyond
    assert only(cells("mine", {22597: 0.5}, "path", margin=2.5)).unexplained == TRIALS // 2


def test_needles_below_the_exact_cut_are_left_out() -> None:
    curve = only(cells("x", dict.fromkeys(LENGTHS[1:], 0.0), margin=-0.5))
    assert curve.shape == "not exercised" and curve.below == TRIALS * len(LENGTHS[1:])


def test_the_place_of_a_cliff_is_compared_with_a_random_choice() -> None:
    text = said(cells("a", random_choice()), cells("b", random_choice(1024), k=1024))
    assert "With k 512, 1 of the curves" in text and "half at 4,096" in text
    assert "With k 1024, 1 of the curves" in text and "half at 8,192" in text


def test_a_needle_lost_where_nothing_competes_is_a_fault_of_its_own() -> None:
    made = cells("x", {}, "path")
    first = next(place for place, cell in enumerate(made) if not cell.exercised)
    found = made[first].result
    assert found is not None
    made[first] = replace(made[first], result=replace(found, selected=False))
    curve = only(made)
    assert curve.shape == "loss without choice" and curve.unexplained == 1 and curve.lost == 0
    assert "A loss even where every entry may be selected: x" in said(made)


def test_a_variant_that_raises_is_said() -> None:
    broken = [Cell("gaussian", 2, 0, "x", "path", 512, 4509, 0.5, 9, 1127, None, "RuntimeError: no kernel")]
    assert only(broken).shape == "crashed"
    assert "it raised: x (RuntimeError: no kernel)" in said(broken)


def test_fit_and_crossing() -> None:
    assert falling([1.0, 0.4, 0.6, 0.1], [1, 1, 1, 1]) == pytest.approx([1.0, 0.5, 0.5, 0.1])
    assert crossing([1000, 4000], [1.0, 0.0], 0.5) == pytest.approx(2000)
    assert crossing([1000, 4000], [1.0, 0.6], 0.5) is None
    low, high = wilson(0, 100)
    assert low == 0 and high == pytest.approx(0.037, abs=0.001)
