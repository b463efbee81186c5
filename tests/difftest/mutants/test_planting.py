"""A planted fault sits in one block of one stage, and the object is whole again after it."""

import pytest
import torch
from difftest.cases.field_reports import FIELD_REPORTS

from difftest.mutants import Mutant, find, mutants, plant
from difftest.mutants.adapters import (
    as_key,
    as_rotation,
    attended,
    keys,
    make_key,
    make_query,
    pooled_after_drafts,
    pooled_in_batch,
    pooled_in_chunks,
    queries,
    scored,
    selected,
    selected_by_position,
)
from difftest.mutants.bench import Bench
from difftest.mutants.bench_cases import CHUNKED
from difftest.paths.base import get_path
from difftest.policy import load_policy
from difftest.trace import Trace
from difftest.verdict import failure


def reference(report):
    return FIELD_REPORTS[report].reference


def turned(make, report):
    from functools import partial

    return partial(make, rotate=as_rotation(reference(report)))


STAND_INS = {
    "key": ("index_k", keys(make_key)),
    "rotated key": ("index_k", keys(turned(make_key, "n1-pairs"))),
    "reported key": ("index_k", keys(as_key(reference("n3-entry-position")))),
    "query": ("index_q", queries(make_query)),
    "rotated query": ("index_q", queries(turned(make_query, "n2-base-by-layer-kind"))),
    "pool in chunks": ("compressed", pooled_in_chunks(reference("c2-chunked-keys"))),
    "pool in a batch": ("compressed", pooled_in_batch(reference("c4-batch-neighbours"))),
    "pool after drafts": ("compressed", pooled_after_drafts(reference("c5-rejected-drafts"))),
    "score": ("score", scored(reference("l1-relu-and-weight"))),
    "selection": ("topk", selected(reference("t1-candidate-buffer"))),
    "selection by position": ("topk", selected_by_position(reference("l8-step-visibility"))),
    "attention": ("attention", attended(reference("a2-a3-slot-0-and-sink"))),
}
"""What a fault is planted through, without a fault."""


@pytest.fixture(scope="module")
def bench():
    torch.set_num_threads(1)
    return Bench()


@pytest.mark.parametrize("name", STAND_INS)
def test_a_stand_in_without_a_fault_agrees(bench, name):
    stage, seeds = STAND_INS[name]
    mutant = Mutant("none", "", stage, CHUNKED, seeds, "")
    for path in seeds:
        assert failure(bench.check_stage(mutant, path), load_policy("default")) is None


def test_only_the_stage_at_fault_is_touched_and_the_path_is_whole_again(bench):
    path, inputs = get_path("sglang-fp8-model"), bench.inputs(CHUNKED)
    clean = Trace("case", 2, "clean", dict(bench.faultless("sglang-fp8-model", CHUNKED).trace.stages))
    planted = plant(path, "n1-half-split-latent")
    assert torch.equal(planted.stage("index_k", inputs, clean)["value"], clean.value("index_k"))
    wrong = planted.stage("kv", inputs, clean)["compressed"]
    assert not torch.equal(wrong, clean["kv"]["compressed"])
    assert "rotate" not in vars(path)
    assert torch.equal(path.stage("kv", inputs, clean)["compressed"], clean["kv"]["compressed"])


def test_a_fault_that_raises_leaves_the_path_whole():
    path = get_path("bf16-k")
    planted = plant(path, "n3-last-token")
    with pytest.raises(AttributeError):
        planted.stage("index_k", None, None)
    assert "store_step" not in vars(path)


def test_both_paths_have_at_least_45_mutants_and_names_are_unique():
    for path in ("sglang-fp8-model", "bf16-k"):
        assert len(mutants(path)) >= 45
    every = list(mutants().values())
    assert len({mutant.name for mutant in every}) == len(every)
    assert all(mutant.says and mutant.name.startswith(mutant.report.lower()) for mutant in every)


def test_unknown_names_are_answered_with_the_nearest():
    with pytest.raises(ValueError, match=r"unknown mutant 'l8-step-visible': did you mean l8-step-visibility"):
        find("l8-step-visible")
    with pytest.raises(ValueError, match=r"s2-payload-stride has no seed in sglang-fp8-model: it has in bf16-k"):
        plant("sglang-fp8-model", "s2-payload-stride")


def test_a_planted_path_by_its_spec():
    path = get_path("mutant:of=bf16-k,name=l8-step-visibility")
    assert path.name == "mutant:of=bf16-k,name=l8-step-visibility"
    assert path.declares == get_path("bf16-k").declares and path.availability().ok
    assert get_path("mutant").availability().install == "give mutant:of=PATH,name=MUTANT"
