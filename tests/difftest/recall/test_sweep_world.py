"""Worlds of the sweep: every row finds its own needle exactly, cut lengths share one sequence, long ones are pooled."""

import pytest
import torch
from difftest.cases.needle import NEEDLE_HEADS
from difftest.reference import oracle

from difftest.paths.base import get_path
from difftest.recall.sweep_attention import change, needle_cost, outputs
from difftest.recall.sweep_measure import measure_exact, run_scores
from difftest.recall.sweep_world import DISTRACTORS, SEQUENCE, World, WorldSpec, groups, make_world, with_topk

LENGTHS, DEPTHS = (1000, 2500, 3001), (0.05, 0.5, 0.95)


def world(distractor: str = "gaussian", **changes: object) -> World:
    spec = {"distractor": distractor, "layer": 2, "seed": 0, "lengths": LENGTHS, "depths": DEPTHS, **changes}
    return make_world(WorldSpec(**spec))  # type: ignore[arg-type]


@pytest.mark.parametrize("distractor", sorted(set(DISTRACTORS) - {"adversarial"}))
def test_the_exact_selection_holds_every_needle(distractor: str) -> None:
    made = world(distractor)
    exact = measure_exact(made, (512,))[0]
    held = (exact.trace.value("topk") == made.entry[:, None]).any(1)
    assert held.all(), "a needle that the exact scores lose cannot be lost by a path"
    score = exact.trace.value("score")
    rank = (score > score.gather(1, made.entry[:, None])).sum(1)
    assert int(rank.max()) < 16, "needles stand out among their distractors"


def test_adversarial_needles_lie_just_above_the_cut() -> None:
    made = world("adversarial")
    exact = measure_exact(made, (512,))[0]
    margins = exact.margins(get_path("sglang-fp8-model").declares)
    assert margins[:3] == [None] * 3, "1,000 tokens show 250 entries: nothing competes"
    assert all(margin is not None and -0.1 < margin < 0.6 for margin in margins[3:])


def test_a_row_sees_its_length_and_its_depth() -> None:
    made = world()
    assert made.inputs.visible.tolist() == [length // 4 for length in LENGTHS for _ in DEPTHS]
    for (length, depth), entry in zip(made.cells, made.entry.tolist(), strict=True):
        assert abs(entry - depth * (length // 4)) <= len(made.cells)
    assert len(set(made.entry.tolist())) == len(made.cells)


def test_equal_recipes_make_equal_worlds_and_seeds_differ() -> None:
    one, same, other = world(), world(), world(seed=1)
    assert one.inputs.index is not None and same.inputs.index is not None and other.inputs.index is not None
    assert torch.equal(one.inputs.index.kv_score, same.inputs.index.kv_score)
    assert torch.equal(one.latents, same.latents)
    assert not torch.equal(one.inputs.index.kv_score, other.inputs.index.kv_score)


def test_tokens_arrive_in_chunks_that_windows_straddle() -> None:
    steps = world().inputs.steps
    assert len(steps) > 1 and steps[0][0].stop % 4


def test_long_lengths_have_their_own_sequence_with_its_history_pooled() -> None:
    assert groups((SEQUENCE + 4, 338, 1000)) == [(338, 1000), (SEQUENCE + 4,)]
    made = world(lengths=(SEQUENCE + 4,), depths=(0.5,))
    index = made.inputs.index
    assert index is not None and len(index.pooled_prefix) > 8000 and len(index.kv_score) < 1000
    score = run_scores(get_path("sglang-fp8-model"), made).value("score")
    assert int(score[0].argmax()) == int(made.entry[0])


def test_attention_is_the_oracles() -> None:
    made = world(lengths=(2500,))
    exact = measure_exact(made, (512,))[0]
    topk = exact.trace.value("topk")
    want, _ = oracle.attention(made.inputs, topk, made.window, made.latents)
    got, _ = outputs(made, topk)
    assert float(change(got, want.float()).max()) < 1e-5


def test_losing_a_needle_costs_the_heads_that_look_for_it() -> None:
    made = world(lengths=(2500,))
    exact = measure_exact(made, (512,))[0]
    cost, _ = needle_cost(made, exact.trace.value("topk"))
    assert (cost.mass > 0.4).all() and (cost.mass_all < cost.mass).all() and (cost.output > 0.2).all()
    _, mass = outputs(made, exact.trace.value("topk"))
    assert torch.allclose(mass[:, :NEEDLE_HEADS].mean(1), cost.mass, atol=1e-5)


def test_another_k_leaves_the_world_alone() -> None:
    made = world()
    wider = with_topk(made, 1024)
    assert wider.inputs.config.index_topk == 1024 and made.inputs.config.index_topk == 512
    assert torch.equal(wider.entry, made.entry)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"distractor": "easy"}, "unknown distractor model 'easy'"),
        ({"layer": 3}, "layer 3 is hca"),
        ({"lengths": (12,)}, "fewer entries than there are depths"),
    ],
)
def test_bad_recipes_are_one_sentence(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        world(**changes)
