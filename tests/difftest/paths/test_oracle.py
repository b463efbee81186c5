import pytest
import torch
from difftest.cases.case import Case
from difftest.cases.generate import generate
from difftest.reference import oracle
from difftest.reference.inputs import LayerInputs

from difftest.paths.base import Declaration, get_path
from difftest.paths.oracle import Oracle
from difftest.stages import STAGES, stages_of

LAYER = {"swa": 0, "csa": 2, "hca": 3}
SMALL = {"index_n_heads": 4, "num_attention_heads": 3, "head_dim": 128, "index_topk": 16, "sliding_window": 24}
STORED = 2.0**-24
"""Relative error of the one rounding to fp32 that each stage's tensor carries."""


@pytest.fixture(params=["csa", "hca", "swa"])
def inputs(request: pytest.FixtureRequest) -> LayerInputs:
    case = Case("small-oracle", "gaussian", (300, 171), rows=12, overrides=SMALL)
    return generate(case, LAYER[request.param])


def test_is_registered_and_declares_no_rounding() -> None:
    path = get_path("oracle")
    assert isinstance(path, Oracle)
    assert path.declares == Declaration(pool="fp64", score="fp64", attention="fp64")


def test_every_stage_has_its_tensors_in_fp32(inputs: LayerInputs) -> None:
    trace = Oracle().run(inputs, "small-oracle")
    assert list(trace.stages) == stages_of(inputs.kind)
    for stage, tensors in trace.stages.items():
        assert list(tensors) == list(STAGES[stage].tensors)
        for tensor in tensors.values():
            assert tensor.dtype == (torch.int32 if stage == "topk" else torch.float32)


def test_each_stage_is_the_exact_one_of_what_it_read(inputs: LayerInputs) -> None:
    """Recomputed in fp64 from the trace's own upstream tensors and rounded to fp32: bit for bit."""
    trace = Oracle().run(inputs, "small-oracle")
    topk = trace.value("topk") if inputs.kind == "csa" else None
    out, lse = oracle.attention(inputs, topk, trace["kv"]["window"], trace["kv"]["compressed"])
    assert torch.equal(trace["attention"]["value"], out.float()) and torch.equal(trace["attention"]["lse"], lse.float())
    if inputs.kind == "csa":
        keys = oracle.index_k(inputs, trace.value("compressed"))
        assert torch.equal(trace.value("index_k"), keys.float())
        scores = oracle.score(inputs, *(trace.value(stage) for stage in ("index_k", "index_q", "head_weight")))
        assert torch.equal(trace.value("score"), scores.float())


def test_storing_in_fp32_hardly_moves_the_chain(inputs: LayerInputs) -> None:
    """Attention of the chain in fp64 against the path's: latents off by 2^-24 each way, amplified by the softmax."""
    exact = oracle.run(inputs)
    trace = Oracle().run(inputs, "small-oracle")
    if inputs.kind == "csa":
        assert torch.equal(trace.value("topk"), exact["topk"]["value"])
    difference = (trace.value("attention") - exact["attention"]["value"]).abs().max()
    assert 0 < difference < 100 * STORED * exact["attention"]["value"].abs().max()


def test_a_given_stage_is_taken_instead(inputs: LayerInputs) -> None:
    path = Oracle()
    given = path.run(inputs, "small-oracle", upto="compressed" if inputs.kind == "csa" else "kv")
    stage = next(iter(given.stages))
    for tensor in given.stages[stage].values():
        tensor.mul_(1.5).add_(0.25)
    changed, plain = path.run(inputs, "small-oracle", given=given), path.run(inputs, "small-oracle")
    assert changed.stages[stage] is given.stages[stage]
    downstream = "index_k" if inputs.kind == "csa" else "attention"
    assert not torch.equal(changed.value(downstream), plain.value(downstream))
