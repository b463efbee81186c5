"""Reductions keep the values that they keep, return valid layers, and never make a correct path fail."""

import random
from dataclasses import replace

import pytest
import torch
from difftest.cases.case import Case
from difftest.cases.generate import generate

from difftest.capture import input_tensors, validate
from difftest.diagnose.reductions import (
    AXES,
    SIZES,
    Impossible,
    cut_tails,
    keep_attention_heads,
    keep_entries,
    keep_index_heads,
    keep_requests,
    keep_rows,
    keep_steps,
    keep_window,
    plain_pages,
    with_topk,
)
from difftest.diagnose.signature import examine
from difftest.diagnose.simplify import RULES, complexity, float_tensors, whole_tensors, with_tensor, zeroed
from difftest.paths.base import get_path
from difftest.policy import load_policy

SMALL = {"index_topk": 8, "index_n_heads": 6, "num_attention_heads": 3, "sliding_window": 12}
CASES = {
    "prefill": Case("prefill", "gaussian", (119, 70, 9), rows=9, overrides=SMALL),
    "decode": Case("decode", "gaussian", (150, 83), "decode", decode_tokens=3, overrides=SMALL),
    "chunked": Case("chunked", "outlier-heavy", (131, 50), "chunked", chunk=37, rows=6, overrides=SMALL),
    "pooled": Case("pooled", "gaussian", (160, 90), "decode", decode_tokens=3, pooled_prefix=12, overrides=SMALL),
    "hca": Case("hca", "gaussian", (390, 131), rows=5, layers=(3,), overrides=SMALL),
    "swa": Case("swa", "gaussian", (60, 31), rows=5, layers=(0,), overrides=SMALL),
}


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def layer(name):
    case = CASES[name]
    return generate(case, case.layers[0])


def oracle(inputs, upto=None):
    return get_path("oracle").run(inputs, "x", upto=upto)


@pytest.mark.parametrize("name", ["prefill", "decode", "pooled"])
def test_a_request_is_the_same_alone(name):
    inputs = layer(name)
    whole, alone = oracle(inputs), keep_requests(inputs, [1])
    part = oracle(alone)
    rows, entries = inputs.row_request == 1, slice(*inputs.entry_offset[1:3])
    assert torch.equal(part.value("compressed"), whole.value("compressed")[entries])
    assert torch.equal(part.value("attention"), whole.value("attention")[rows])
    width = part.value("score").shape[1]
    assert torch.equal(part.value("score"), whole.value("score")[rows][:, :width])


def test_rows_are_the_same_alone():
    inputs = layer("prefill")
    whole, part = oracle(inputs), oracle(keep_rows(inputs, [2, 5]))
    assert torch.equal(part.value("topk"), whole.value("topk")[[2, 5]])
    assert torch.equal(part.value("attention"), whole.value("attention")[[2, 5]])
    assert torch.equal(part["kv"]["compressed"], whole["kv"]["compressed"])


@pytest.mark.parametrize("name", ["prefill", "pooled", "hca"])
def test_first_entries_are_the_same_without_later_ones(name):
    inputs = layer(name)
    first, second = inputs.entries[0] - 1, inputs.entries[1] - 1 or 1
    kept = [*range(first), *range(inputs.entry_offset[1], inputs.entry_offset[1] + second)]
    less = keep_entries(inputs, [*kept, *range(inputs.entry_offset[2], inputs.entry_offset[-1])])
    assert less.entries[:2] == (first, second)
    whole, part = oracle(inputs, "kv"), oracle(less, "kv")
    assert torch.equal(part["kv"]["compressed"][: len(kept)], whole["kv"]["compressed"][kept])


def test_a_middle_entry_is_pooled_from_the_same_tokens():
    inputs = layer("prefill")
    inputs = keep_requests(inputs, [0])
    own = inputs.index.kv_score.clone()
    less = keep_entries(inputs, [11])
    assert less.entries == (1,)
    assert torch.equal(less.index.kv_score[:4], own[44:48])
    assert int(less.row_position.max()) == less.lengths[0] - 1


def test_rows_move_to_the_last_token_they_still_see():
    inputs = keep_requests(layer("decode"), [0])
    before = inputs.visible.tolist()
    less = keep_entries(inputs, list(range(20)))
    assert less.visible.tolist() == [min(20, count) for count in before]
    assert not (less.row_position >= less.lengths[0]).any()


def test_heads_are_the_same_alone():
    inputs = layer("prefill")
    whole, part = oracle(inputs), oracle(keep_attention_heads(keep_index_heads(inputs, [1, 4]), [2]))
    assert torch.equal(part.value("index_q"), whole.value("index_q")[:, [1, 4]])
    inputs = with_topk(inputs, 64)
    whole, part = oracle(inputs), oracle(keep_attention_heads(inputs, [2]))
    assert torch.equal(part.value("attention"), whole.value("attention")[:, [2]])


def test_a_smaller_window_holds_the_last_tokens():
    inputs = layer("swa")
    less = keep_window(inputs, 1)
    assert torch.equal(less.window_position[less.window_index[:, 0]], inputs.row_position)
    assert torch.equal(less.window_kv[less.window_index[:, 0]], inputs.window_kv[inputs.window_index[:, -1]])


def test_steps_pages_and_tails():
    inputs = layer("chunked")
    one = keep_steps(inputs, [0])
    assert len(one.steps) == 1 and {(span.start, span.stop) for span in one.steps[0]} == {(0, 131), (0, 50)}
    some = keep_steps(inputs, [0, 2])
    assert [span.stop for span in some.steps[0]] == [inputs.steps[1][0].stop, inputs.steps[1][1].stop]
    with pytest.raises(Impossible):
        keep_steps(inputs, [1])
    plain = plain_pages(inputs, 1)
    assert plain.page_table.tolist() == [[1], [2]] and plain.num_pages == 3
    assert cut_tails(inputs).lengths == (128, 48)
    for reduced in (one, some, plain, cut_tails(inputs)):
        validate(reduced)


def test_impossible_reductions_say_so():
    inputs = layer("swa")
    with pytest.raises(Impossible):
        keep_index_heads(inputs, [0])
    prefill = keep_rows(layer("prefill"), [0])
    other = 1 - int(prefill.row_request[0])
    with pytest.raises(Impossible):
        keep_requests(prefill, [other])


def reduced_at_random(inputs, seed):
    """A few random reductions and simplifications; dims stay."""
    dice = random.Random(seed)
    axes = [axis for axis in AXES if axis.size(inputs)]
    constants = [size for size in SIZES if size.now(inputs) and not size.name.endswith("dims")]
    for _ in range(dice.randint(2, 7)):
        kind = dice.choice(["axis", "axis", "size", "tails", "pages", "whole", "zero"])
        try:
            if kind == "axis":
                axis = dice.choice(axes)
                count = axis.size(inputs)
                inputs = axis.keep(inputs, sorted(dice.sample(range(count), max(1, count // dice.choice([2, 4, 9])))))
            elif kind == "size":
                size = dice.choice(constants)
                inputs = size.make(inputs, dice.choice(size.choices(inputs) or [size.now(inputs)]))
            elif kind in ("tails", "pages"):
                inputs = cut_tails(inputs) if kind == "tails" else plain_pages(inputs, dice.randint(0, 1))
            else:
                name = dice.choice(list(float_tensors(inputs)))
                axis = dice.randrange(input_tensors(inputs)[name].ndim)
                count = input_tensors(inputs)[name].shape[axis]
                simpler = list(whole_tensors(inputs, name)) if kind == "whole" else []
                simpler += [zeroed(inputs, name, axis, sorted(dice.sample(range(count), (count + 1) // 2)))]
                inputs = simpler[0].inputs if simpler[0] else inputs
        except Impossible:
            continue
    return inputs


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", range(3))
def test_a_correct_path_stays_correct(name, seed):
    """Otherwise a search could end on a failure of its own making."""
    inputs = reduced_at_random(layer(name), f"{name}{seed}")
    validate(inputs)
    brought = {
        (span.request, token) for step in inputs.steps for span in step for token in range(span.start, span.stop)
    }
    assert set(zip(inputs.row_request.tolist(), inputs.row_position.tolist(), strict=True)) <= brought
    seen = examine(
        get_path("sglang-fp8-model"), inputs, "x", replace(load_policy("default"), accumulated_findings="note")
    )
    assert seen.signature is None, seen.verdict


def test_simpler_values():
    inputs = layer("prefill")
    tensor = torch.tensor([[0.0, 0.3, -1.7], [0.0, 2.9, 100.0]])
    powers, bits = RULES[3].apply("x", tensor), RULES[4].apply("x", tensor)
    assert powers.tolist() == [[0, 0.25, -2], [0, 4, 128]]
    assert bits.tolist() == [[0, 0.3125, -1.75], [0, 3, 96]]
    assert RULES[0].apply("index.norm_weight", tensor).eq(1).all()
    first = next(whole_tensors(inputs, "index_query"))
    assert first.words == "constant" and complexity(first.inputs)["index_query"] == "zero"
    assert not list(whole_tensors(first.inputs, "index_query"))
    assert zeroed(first.inputs, "index_query", 0, [0]) is None
    part = zeroed(inputs, "index_weight", 1, [0, 2])
    assert part.changed == 2 * len(inputs.row_position)
    assert with_tensor(inputs, "index.ape", torch.zeros_like(inputs.index.ape)).index.ape.eq(0).all()


def test_no_rule_undoes_zeros():
    inputs = layer("prefill")
    query = torch.zeros_like(inputs.index_query)
    query[0] = 1
    simpler = list(whole_tensors(with_tensor(inputs, "index_query", query), "index_query"))
    assert [step.words for step in simpler] == ["constant"]
