"""Soaking: different small cases, no alarm on clean paths, and an alarm that can be made again on a faulty one."""

from collections import Counter

import pytest
import torch
from difftest.cases.case import Case
from typer.testing import CliRunner

from difftest.cli import app
from difftest.soak import LAYERS, MODES, recipe, soak, soak_one


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def test_recipes_differ_and_cover_modes_families_and_layer_kinds():
    cases = [recipe(seed) for seed in range(200)]
    assert cases[:20] == [recipe(seed) for seed in range(20)]
    assert len({case.to_json() for case in cases}) == 200
    assert {case.mode for case in cases} == set(MODES)
    assert {case.layers[0] for case in cases} == set(LAYERS)
    assert min(Counter(case.family for case in cases).values()) >= 5


@pytest.mark.parametrize("seed", [16, 31])
def test_a_coarse_format_of_nearly_equal_keys_is_no_common_factor(seed):
    """Keys a rounding step apart are rounded alike, so e2m1 scales all their scores by 0.96 or 0.98."""
    made = soak_one(seed, ["deepseek", "sglang-fp4-model"], "default")
    assert made.alarms == [] and made.answers["explained"]


def test_every_path_on_a_few_seeds():
    made = soak(range(500, 503))
    assert made.seeds == 3 and made.layers == 24
    assert made.alarms == []


def test_an_alarm_comes_with_the_recipe_that_makes_it_again():
    seed = next(seed for seed in range(100) if recipe(seed).layers == (2,))
    made = soak([seed], ["mutant:of=sglang-fp8-model,name=l1-no-relu"])
    [alarm] = made.alarms
    assert alarm.startswith(f"seed {seed}: soak-{seed} layer 2 mutant:") and "bug at score" in alarm
    assert Case.from_json(alarm.partition("recipe ")[2]) == recipe(seed)


def test_a_soak_whose_time_is_up_cannot_judge():
    made = CliRunner().invoke(app, ["soak", "--seeds", "40", "--minutes", "0", "--jobs", "1", "--path", "oracle"])
    assert made.exit_code == 125
    assert made.stdout.splitlines()[0].startswith("0 seeds of 40, then the time was up")


def test_counts_of_a_soak_in_words():
    made = CliRunner().invoke(app, ["soak", "--seeds", "2", "--jobs", "1", "--path", "oracle"])
    assert made.exit_code == 0, made.output
    assert made.stdout.splitlines()[-1] == "0 false alarms"
    assert CliRunner().invoke(app, ["soak", "--path", "orakle"]).exit_code == 2
