"""Blame on real mixtures of two paths: bugs, formats, both, kernels that cannot be fed, saved traces."""

from dataclasses import replace

import pytest
import torch
from difftest.cases.case import Case
from difftest.cases.generate import generate

from difftest.diagnose.blame import Blame, blame
from difftest.diagnose.blame_report import layer_lines, summary_lines
from difftest.diagnose.consequence import Harm
from difftest.diagnose.substitute import Mixture, Side, deviate, same_swaps, upstream
from difftest.mutants import plant
from difftest.paths.base import get_path
from difftest.policy import load_policy
from difftest.run_dir import RunDir
from difftest.runner import Plan, run

SMALL = {"index_topk": 48, "num_attention_heads": 4, "sliding_window": 16}
CASE = Case("blame-me", "gaussian", (431, 263), "chunked", chunk=117, rows=10, layers=(2,), overrides=SMALL)
NOTHING = frozenset()


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def inputs():
    return generate(CASE, 2)


def mixture_of(inputs, own, other="oracle"):
    own, other = get_path(own), get_path(other)
    return Mixture(inputs, Side(own.run(inputs, CASE.id), own), Side(other.run(inputs, CASE.id), other))


def test_a_mixture_of_all_stages_is_the_other_path_and_of_none_the_own(inputs):
    mixture = mixture_of(inputs, "sglang-fp8-model")
    every = frozenset(mixture.stages)
    for stage in mixture.stages:
        assert mixture.tensors(stage, NOTHING) is mixture.own.trace[stage]
        assert mixture.tensors(stage, every) is mixture.other.trace[stage]
    harm = Harm(mixture)
    assert all(harm.of(name, every) == 0 < harm.of(name, NOTHING) for name in harm.names())


def test_a_stage_depends_on_its_upstream_alone(inputs):
    mixture = mixture_of(inputs, "sglang-fp8-model")
    assert upstream("score", "csa") == {"compressed", "index_k", "index_q", "head_weight", "score"}
    assert upstream("attention", "hca") == {"kv", "attention"}
    one, two = (mixture.tensors("index_k", frozenset({"compressed", stage})) for stage in ("index_q", "kv"))
    assert one is two


def test_a_replaced_stage_reads_what_the_mixture_has_before_it(inputs):
    """The oracle's scores of the path's own keys, not the oracle's own scores."""
    mixture = mixture_of(inputs, "sglang-fp8-model")
    got = mixture.value("score", frozenset({"score"}))
    want = get_path("oracle").stage("score", inputs, mixture.own.trace)["value"]
    assert torch.equal(got, want) and not torch.equal(got, mixture.other.trace.value("score"))


def test_a_kernel_that_cannot_be_fed_is_carried(inputs):
    """bf16-k's scorer takes bf16 keys: on exact ones its own deviation is put on the exact scores."""
    mixture = mixture_of(inputs, "bf16-k")
    got = mixture.value("score", frozenset({"index_k"}))
    assert mixture.carried == {"score"}
    exact = mixture.other.trace.value("score")
    seen = exact.isfinite()
    assert torch.equal(got.isfinite(), seen)
    assert (got - exact)[seen].norm() < (mixture.own.trace.value("score") - exact)[seen].norm()


def test_deviations_and_swaps_are_made_again():
    got, before = torch.tensor([1.5, -torch.inf, 2.0]), torch.tensor([1.0, -torch.inf, 2.0])
    assert deviate(got, before, torch.tensor([5.0, 7.0, -torch.inf])).tolist() == [5.5, 7.0, -torch.inf]
    picks = torch.tensor([[0, 1, 9, -1]])
    assert same_swaps(picks, torch.tensor([[0, 1, 2, -1]]), torch.tensor([[1, 2, 3, 4]]), 10).tolist() == [[1, 3, 4, 9]]


BUGS = {
    "n3-last-token": ("index_k", "selection"),
    "t8-lost-ranks": ("topk", "selection"),
    "l1-no-head-factor": ("head_weight", "score"),
    "n1-half-split-latent": ("kv", "attention"),
    "k2-mean-pool": ("compressed", "selection"),
    "a6-not-rotated": ("attention", "attention"),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_blamed_on_its_stage_with_what_it_cost(name):
    stage, consequence = BUGS[name]
    [found] = blame(CASE, plant("sglang-fp8-model", name)).layers
    assert list(found.failed) == [stage] and found.primary == consequence
    assert found.culprits[0].kind == "bug" and found.culprits[0].stage == stage
    assert found.largest[0] == stage and stage in found.shares.smallest[0]
    assert found.verdict.exit_code == 1


def test_a_fault_on_both_sides_restores_only_together():
    [found] = blame(CASE, plant("sglang-fp8-model", "n5-no-hadamard")).layers
    assert list(found.failed) == ["index_k", "index_q"]
    score = found.costs["score"]
    assert score.smallest[0] == {"index_k", "index_q"} and score.alone["index_k"] < -1
    assert {one.players for one in score.interactions} == {("index_k", "index_q")}


def test_a_format_is_blamed_where_no_check_fails():
    policy = load_policy("strict")
    found = blame(CASE, "sglang-fp8-model", policy=policy)
    [layer] = found.layers
    assert layer.failed == {} and layer.verdict.answer == "explained" and found.exit_code == 1
    assert {str(who) for who in layer.culprits} == {"format e4m3 at index_k", "format e4m3 at index_q"}
    assert sum(layer.shares.shapley.values()) == pytest.approx(1, abs=0.02)
    assert "smallest set that restores it: index_k + index_q" in "\n".join(layer_lines(layer))


def test_a_fault_that_no_check_of_a_stage_shows_is_told_as_such():
    """Under a policy without isolated bounds, scores half as large as the exact ones are seen by comparison alone."""

    class Scaled(type(get_path("sglang-fp8-model"))):
        def scale_score(self, total, scale):
            return 0.5 * super().scale_score(total, scale)

    [found] = blame(CASE, Scaled(), policy=replace(load_policy("default"), isolated={})).layers
    assert found.failed == {} and found.costs["score"].smallest[0] == {"score"}
    assert found.answer.startswith("bug at score, by comparison alone")


def test_a_passing_case_has_nothing_to_blame():
    found = blame(CASE, "bf16-k")
    assert found.exit_code == 0 and found.layers[0].nothing and found.layers[0].costs == {}
    assert layer_lines(found.layers[0]) == ["blame-me layer 2, bf16-k against oracle: nothing to blame"]


def test_against_another_path_its_stages_are_put_in():
    [found] = blame(CASE, plant("bf16-k", "n3-last-token"), "sglang-fp8-model").layers
    assert found.other == "sglang-fp8-model" and found.shares.smallest[0] == {"index_k"}


def test_a_crash_is_blamed_on_its_stage_without_costs():
    class Crashes(type(get_path("sglang-fp8-model"))):
        def head_weight(self, inputs, trace):
            raise RuntimeError("illegal memory access")

    [found] = blame(CASE, Crashes()).layers
    assert found.answer == "bug at head_weight" and found.costs == {} and found.verdict.rule == "crash"


def test_a_path_that_stops_late_is_blamed_for_what_it_made():
    """Latents of another width than the cache holds: the index stages are there, attention is not."""
    case = replace(CASE, overrides={**SMALL, "head_dim": 128})
    [found] = blame(case, plant("sglang-fp8-model", "n3-last-token")).layers
    assert list(found.costs) == ["score", "selection"] and found.answer == "bug at index_k"


def test_inputs_with_a_nan_cannot_be_judged():
    found = blame(replace(CASE, family="non-finite"), "sglang-fp8-model")
    assert found.exit_code == 125 and found.layers[0].answer.startswith("cannot judge")


def test_layers_are_told_first_and_most():
    class Worse(type(get_path("sglang-fp8-model"))):
        """Rotates latents at the wrong place: a little on layer 14, much on layer 28."""

        def entry_position(self, inputs):
            return inputs.entry_position + {2: 0, 14: 1, 28: 90}[inputs.layer]

    found = blame(CASE, Worse(), layers=(2, 14, 28), policy=replace(load_policy("default"), budgets=()))
    assert [layer.nothing for layer in found.layers] == [True, False, False]
    assert found.first.layer == 14 and found.most.layer == 28
    [line] = summary_lines(found)
    assert line.startswith("first: layer 14 (bug at index_k") and "most: layer 28" in line and "2 of 3 layers" in line
    assert Blame([]).first is None


def test_saved_traces_give_the_same_answer_without_running_the_path(tmp_path, monkeypatch):
    spec = "mutant:of=sglang-fp8-model,name=n3-last-token"
    run(Plan([CASE], [spec]), RunDir.create(tmp_path / "run"))
    [live] = blame(CASE, spec).layers
    monkeypatch.setattr("difftest.mutants.registry.NamedMutant.stage", lambda *_: pytest.fail("the path was run"))
    [saved] = blame(replace(CASE, layers=(14, 2)), spec, traces=tmp_path / "run").layers
    assert saved.answer == live.answer and saved.shares.smallest[0] == live.shares.smallest[0]
    assert saved.shares.shapley["index_k"] == pytest.approx(live.shares.shapley["index_k"], abs=0.05)
    assert "score" in saved.carried
    with pytest.raises(ValueError, match=r"does not exist: run the case with --keep all, or leave out --trace"):
        blame(CASE, "bf16-k", traces=tmp_path / "run")


def test_other_layer_kinds_have_attention_alone():
    case = replace(CASE, id="blame-hca", layers=(3,), lengths=(431, 263))
    [found] = blame(case, plant("sglang-fp8-model", "a6-yarn-factor")).layers
    assert list(found.costs) == ["attention"] and found.largest[0] == "attention"
    assert found.answer.startswith("bug at attention")
