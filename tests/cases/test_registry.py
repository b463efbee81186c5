"""The list of cases: ids, profiles, and that each recipe can be made."""

import re
from typing import get_args

import pytest
from difftest.cases.case import Case, Profile
from difftest.cases.families import FAMILIES
from difftest.cases.recorded_cases import RECORDED_CASES
from difftest.cases.registry import CASES, all_cases, profile


def test_ids_are_unique_kebab_case_with_a_number() -> None:
    assert len(all_cases()) == len(CASES)
    for name in all_cases():
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name) and re.search(r"\d", name), name


def test_profiles_nest_and_hold_what_they_must() -> None:
    names = {name: {case.id for case in profile(name)} for name in get_args(Profile)}
    assert names["smoke"] < names["default"] < names["full"] < names["gpu"]
    assert {"needle-22597", *(case.id for case in RECORDED_CASES)} <= names["default"]
    assert {"decode-1048576", "prefill-8257"} <= names["gpu"] - names["full"]
    kinds = {case.config.kind(layer) for case in profile("full") for layer in case.layers}
    assert kinds == {"swa", "csa", "hca"}
    assert {case.mode for case in profile("default")} == {"prefill", "chunked", "decode", "resume"}
    assert {case.family for case in CASES} == set(FAMILIES)


def test_layers_of_a_case_are_of_one_kind() -> None:
    several = {case.id for case in RECORDED_CASES} | {"stack-2117"}  # a recording serves several kinds
    for case in CASES:
        assert len({case.config.kind(layer) for layer in case.layers}) == 1 or case.id in several, case.id


def test_one_case_runs_every_layer_of_the_model() -> None:
    stack = all_cases()["stack-2117"]
    assert stack.layers == tuple(range(stack.config.num_hidden_layers))


def test_default_cases_exercise_selection_or_say_that_they_do_not() -> None:
    for case in profile("default"):
        note = "" if max(case.lengths) >= 4 * (case.config.index_topk + 1) else "selection not exercised"
        assert case.selection_note.startswith(note) and bool(case.selection_note) == bool(note), case.id
    assert sum(not case.selection_note for case in profile("default")) >= 12


def test_chunks_split_entries() -> None:
    for case in CASES:
        if case.mode == "chunked":
            assert case.chunk % 4, case.id
    assert all(length % 4 for case in CASES if case.mode == "resume" for length in (case.chunk,))


def test_long_histories_are_given_pooled_up_to_the_decoded_tokens() -> None:
    for case in CASES:
        if case.pooled_prefix:
            assert case.mode == "decode"
            for length in case.lengths:
                assert 0 < length - case.decode_tokens - case.prefix_tokens(length) <= 64
    million = all_cases()["decode-1048576"]
    assert million.lengths[0] // 4 == 262_144 and million.decode_tokens == 8


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_recipes_survive_json(case: Case) -> None:
    assert Case.from_json(case.to_json()) == case
    assert case.says
