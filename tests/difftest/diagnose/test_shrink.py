"""From a failing case to the smallest one: same failure, small enough, and honest where there is none."""

from dataclasses import replace

import pytest
import torch
from difftest.cases.case import Case
from difftest.cases.generate import generate

from difftest.diagnose.reductions import keep_requests, keep_rows
from difftest.diagnose.shrink import Flaky, NothingToShrink, Progress, shrink, sizes, smallest_sets
from difftest.diagnose.signature import Signature, examine
from difftest.paths.base import get_path
from difftest.paths.sglang_fp8_model import SglangFp8Model
from difftest.policy import load_policy

SMALL = {"index_topk": 32, "index_n_heads": 8, "num_attention_heads": 8, "sliding_window": 16}
CASE = Case("shrink-me", "gaussian", (391, 271), "decode", decode_tokens=4, overrides=SMALL)
POLICY = load_policy("default")
ENTRIES, HEADS = 16, 2


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def layer():
    return generate(CASE, 2)


FAULTS = {
    "no-hadamard": ("index_k", "excess"),
    "entry-as-position": ("index_k", "excess"),
    "bias-phase": ("compressed", "excess"),
    "no-relu": ("score", "excess"),
    "loses-last": ("topk", "order"),
    "second-request-crashes": ("score", "crash"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_smallest_layer_fails_the_same_way(faulty, layer, name):
    path = get_path(name)
    found = shrink(path, layer, CASE.id, POLICY)
    signature = found.original.signature
    assert (signature.stage, signature.rule) == FAULTS[name]
    assert found.finished
    assert examine(path, found.smallest.inputs, "again", POLICY).signature == signature
    assert examine(get_path("sglang-fp8-model"), found.smallest.inputs, "again", POLICY, signature).passes
    size = sizes(found.smallest.inputs)
    assert size["entries"] <= ENTRIES and max(size["index heads"], size["attention heads"]) <= HEADS
    assert size["rows"] == 1 and size["steps"] == 1
    assert size["values"] < 1200 < sizes(layer)["values"]
    assert found.neighbour
    assert examine(path, found.neighbour.inputs, "again", POLICY, signature).passes


def test_it_keeps_what_the_fault_needs(faulty, layer):
    """The last entry of a page is at fault, so a page's worth of entries stays."""
    found = shrink(get_path("page-edge"), layer, CASE.id, POLICY, seconds=30.0)
    assert sizes(found.smallest.inputs)["entries"] == 64
    assert found.smallest.where["entry"] == 63


def test_it_never_ends_on_another_failure(faulty, layer):
    """Fewer dims crash this path, which is no fault of its own and not the one looked for."""
    found = shrink(get_path("full-width-only"), layer, CASE.id, POLICY)
    assert found.signature == found.original.signature
    assert found.signature.rule == "excess" and sizes(found.smallest.inputs)["index dims"] == 128


def test_the_rule_that_broke_first_stays_broken(faulty):
    """A missing sink shows as a head's common factor here, and on a small layer in single elements, too."""
    case = replace(
        CASE, mode="prefill", lengths=(900,), rows=4, overrides=SMALL | {"index_topk": 256, "sliding_window": 128}
    )
    lenient = replace(POLICY, isolated={"excess": 2.0, "gain": 1.0})
    found = shrink(get_path("no-sink"), generate(case, 2), CASE.id, lenient, seconds=10.0)
    assert found.original.verdict.rule == "gain" and found.smallest.verdict.rule == "excess"
    assert found.signature.rule == "gain"
    size = sizes(found.smallest.inputs)
    assert size["attention heads"] == 1 and size["entries"] <= ENTRIES


def test_a_failure_against_the_oracle_alone(layer):
    """Under a policy that bounds no stage, scores that are 0.95 times the exact ones are seen by comparison alone."""

    class Scaled(SglangFp8Model):
        def scale_score(self, total, scale):
            return 0.95 * super().scale_score(total, scale)

    small = keep_rows(keep_requests(layer, [1]), [2])
    found = shrink(Scaled(), small, CASE.id, replace(POLICY, isolated={}), seconds=4.0)
    assert found.signature == Signature("score", "accumulated", "uniform_scale", "times 0.95")
    assert sizes(found.smallest.inputs)["entries"] <= ENTRIES


def test_a_passing_case_has_nothing_to_shrink(layer):
    with pytest.raises(NothingToShrink, match="nothing to shrink: shrink-me layer 2 sglang-fp8-model: agrees") as error:
        shrink(get_path("sglang-fp8-model"), layer, CASE.id, replace(POLICY, budgets=()))
    assert error.value.exit_code == 0


def test_a_price_of_a_format_is_nothing_to_shrink(layer):
    with pytest.raises(NothingToShrink, match=r"no stage is wrong: .* explained by format") as error:
        shrink(get_path("sglang-fp4-model"), layer, CASE.id, POLICY)
    assert error.value.exit_code == 0


def test_what_cannot_be_judged_is_nothing_to_shrink(layer):
    query = layer.index_query.clone()
    query[0, 0, 0] = torch.nan
    with pytest.raises(NothingToShrink, match=r"nan in index_query\[0, 0, 0\]") as error:
        shrink(get_path("sglang-fp8-model"), replace(layer, index_query=query), CASE.id, POLICY)
    assert error.value.exit_code == 125


def test_a_flaky_failure_is_told_with_its_rate(faulty, layer):
    path = get_path("flaky")
    type(path).runs = 0
    with pytest.raises(Flaky, match="on equal inputs 6 of 20 runs failed with score excess"):
        shrink(path, keep_requests(layer, [1]), CASE.id, POLICY, seconds=1e6)


def test_out_of_time_keeps_what_was_found(faulty, layer):
    steps: list[Progress] = []
    found = shrink(get_path("no-relu"), layer, CASE.id, POLICY, seconds=1e-3, on_progress=steps.append)
    assert not found.finished and not steps
    assert found.smallest.signature == found.original.signature
    assert sizes(found.smallest.inputs) == sizes(layer)


def test_an_interrupt_keeps_what_was_found(faulty, layer):
    def stop(progress: Progress) -> None:
        if progress.tries == 4:
            raise KeyboardInterrupt

    found = shrink(get_path("no-relu"), layer, CASE.id, POLICY, on_progress=stop)
    assert not found.finished and found.tries == 4
    assert sizes(found.smallest.inputs)["rows"] < sizes(layer)["rows"]


def test_progress_tells_tries_and_sizes(faulty, layer):
    steps: list[Progress] = []
    found = shrink(get_path("no-relu"), layer, CASE.id, POLICY, on_progress=steps.append)
    assert [step.tries for step in steps] == list(range(1, found.tries + 1))
    assert steps[0].doing == "requests" and steps[-1].size == sizes(found.smallest.inputs)


def test_smallest_sets_come_first_and_hold_the_focus():
    sets = list(smallest_sets(10, 6))
    assert sets[0] == [6] and [5, 6] in sets and [6, 7] in sets
    assert sets[-1] == list(range(7))
    sizes_ = [len(kept) for kept in sets[:-1]]
    assert sizes_ == sorted(sizes_) and max(sizes_) < 10
    assert list(smallest_sets(3, None)) == [[0], [2], [0, 1], [1, 2]]
    assert list(smallest_sets(1, 0)) == []
