from dataclasses import replace

import pytest
import torch
from difftest.cases.case import Case
from difftest.cases.generate import generate
from difftest.reference import deepseek_layer
from difftest.reference.formats import FORMATS, SCALINGS, round_bf16
from difftest.reference.inputs import LayerInputs

from difftest.paths.base import Rounding, get_path
from difftest.paths.deepseek import Deepseek
from difftest.paths.oracle import Oracle
from difftest.stages import STAGES, stages_of
from difftest.trace import Trace

LAYER = {"swa": 0, "csa": 2, "hca": 3}
SMALL = {"index_n_heads": 4, "num_attention_heads": 3, "head_dim": 128, "index_topk": 16, "sliding_window": 24}


def layer(kind: str) -> LayerInputs:
    return generate(Case("small-deepseek", "gaussian", (300, 171), rows=12, overrides=SMALL), LAYER[kind])


@pytest.fixture(params=["csa", "hca", "swa"])
def inputs(request: pytest.FixtureRequest) -> LayerInputs:
    return layer(request.param)


def distance(a: Trace, b: Trace, stage: str) -> float:
    """Relative rms distance of a stage's main tensor over its finite elements."""
    x, y = a.value(stage), b.value(stage)  # type: ignore[arg-type]
    finite = x.isfinite()
    return float((x - y)[finite].norm() / x[finite].norm())


def test_every_stage_has_its_tensors(inputs: LayerInputs) -> None:
    trace = Deepseek().run(inputs, "small-deepseek")
    assert list(trace.stages) == stages_of(inputs.kind)
    for stage, tensors in trace.stages.items():
        assert list(tensors) == list(STAGES[stage].tensors)
        for tensor in tensors.values():
            assert tensor.dtype == (torch.int32 if stage == "topk" else torch.float32)


def test_stored_values_lie_on_the_declared_grids() -> None:
    """Keys and queries on e2m1 of some power-of-two scale per 32, all else that is declared bf16 on bf16."""
    trace = Deepseek().run(layer("csa"), "small-deepseek")
    for stage in ("head_weight", "score", "kv", "attention"):
        for name, tensor in trace[stage].items():
            finite = tensor[tensor.isfinite()]
            assert name == "lse" or torch.equal(round_bf16(finite), finite.double()), stage
    for stage in ("index_k", "index_q"):
        blocks = trace.value(stage).double().unflatten(-1, (-1, SCALINGS["e2m1"].block))
        scale = blocks.abs().amax(-1, keepdim=True)
        on_grid = [FORMATS["e2m1"].holds(blocks / scale * top) for top in (3.0, 4.0, 6.0)]
        assert torch.stack([grid.all(-1) for grid in on_grid]).any(0).all(), stage
    compressed = trace.value("compressed")
    assert not torch.equal(round_bf16(compressed), compressed.double())


def test_distance_from_the_oracle_is_that_of_its_formats() -> None:
    """FP4 costs Gaussian keys and queries 11.5 % rms; bf16 two tenths of a percent; fp32 pooling nothing."""
    inputs = layer("csa")
    exact, trace = Oracle().run(inputs, "small-deepseek"), Deepseek().run(inputs, "small-deepseek")
    assert distance(exact, trace, "compressed") < 1e-6
    assert 0.10 < distance(exact, trace, "index_k") < 0.13
    assert 0.10 < distance(exact, trace, "index_q") < 0.13
    assert 0.001 < distance(exact, trace, "head_weight") < 0.003
    assert 0.001 < distance(exact, trace, "kv") < 0.005


@pytest.mark.parametrize("kind", ["csa", "hca", "swa"])
def test_exact_selection_leaves_only_attention_rounding(kind: str) -> None:
    """With the oracle's selection and latents, bf16 query, P and output cost less than 1 % rms."""
    inputs = layer(kind)
    exact = Oracle().run(inputs, "small-deepseek")
    given = Trace("small-deepseek", inputs.layer, "oracle", {s: t for s, t in exact.stages.items() if s != "attention"})
    assert 0.001 < distance(exact, Deepseek().run(inputs, "small-deepseek", given=given), "attention") < 0.01


def test_intended_kv_fake_quant_changes_latents_and_says_so() -> None:
    published, intended = Deepseek(), get_path("deepseek:kv_fake_quant=intended")
    assert isinstance(intended, Deepseek)
    assert published.declares.window == Rounding(normed="bf16", stored="bf16")
    assert published.declares.latent == Rounding(pooled="bf16", normed="bf16", stored="bf16")
    assert replace(intended.declares, window=published.declares.window, latent=published.declares.latent) == (
        published.declares
    )
    assert intended.declares.window.stored == intended.declares.latent.stored == "e4m3_pow2"
    inputs = layer("csa")
    both = [path.run(inputs, "small-deepseek") for path in (published, intended)]
    for name in ("window", "compressed"):
        first, second = (trace["kv"][name] for trace in both)
        assert torch.equal(first[:, -64:], second[:, -64:])
        plain = first[:, :-64]
        assert 0.02 < float((plain - second[:, :-64]).norm() / plain.norm()) < 0.03
    assert torch.equal(both[0].value("score"), both[1].value("score"))


@pytest.mark.parametrize("spec", ["deepseek:kv_fake_quant=fp8", "deepseek:quant=intended"])
def test_unknown_options_are_refused(spec: str) -> None:
    with pytest.raises(ValueError, match=r"choose published or intended|does not take"):
        get_path(spec)


@pytest.mark.parametrize("kind", ["csa", "hca", "swa"])
def test_small_slices_change_nothing(kind: str) -> None:
    """fp32 sums may be cut differently by the matrix product, so scores and outputs may move by a bf16 step or two."""
    inputs = layer(kind)
    trace, small = Deepseek().run(inputs, "small-deepseek"), 2**12
    assert torch.equal(deepseek_layer.compressed_latent(inputs, max_bytes=small), trace["kv"]["compressed"].bfloat16())
    topk = None
    if kind == "csa":
        topk = trace.value("topk")
        assert torch.equal(
            deepseek_layer.index_k(inputs, trace.value("compressed"), max_bytes=small).float(), trace.value("index_k")
        )
        assert torch.equal(deepseek_layer.index_q(inputs, max_bytes=small).float(), trace.value("index_q"))
        read = [trace.value(stage) for stage in ("index_k", "index_q", "head_weight")]
        scores = deepseek_layer.score(inputs, *read, max_bytes=small).float()
        finite = scores.isfinite()
        assert torch.equal(finite, trace.value("score").isfinite())
        torch.testing.assert_close(scores[finite], trace.value("score")[finite], rtol=2.0**-7, atol=2.0**-7)
    out, _ = deepseek_layer.attention(inputs, topk, *trace["kv"].values(), max_bytes=small)
    torch.testing.assert_close(out.float(), trace.value("attention"), rtol=2.0**-6, atol=2.0**-9)


def test_rows_read_their_own_request() -> None:
    """Each request alone gives the same selection and output as in the batch."""
    inputs = layer("csa")
    trace = Deepseek().run(inputs, "small-deepseek")
    scores = trace.value("score")
    for request, first in enumerate(inputs.entry_offset[:-1]):
        rows = (inputs.row_request == request).nonzero()[:, 0]
        own = trace.value("index_k")[first : inputs.entry_offset[request + 1]]
        exact = torch.einsum("rhd,ed->rhe", trace.value("index_q")[rows], own).relu()
        exact = (exact * trace.value("head_weight")[rows][..., None]).sum(1)
        for place, row in enumerate(rows.tolist()):
            visible = int(inputs.visible[row])
            torch.testing.assert_close(scores[row, :visible], exact[place, :visible], rtol=0.05, atol=0.02)
            assert (scores[row, visible:] == -torch.inf).all()


@pytest.mark.parametrize("path", [Deepseek(), Oracle()], ids=["deepseek", "oracle"])
def test_selection_is_the_best_of_what_is_visible(path: Deepseek | Oracle) -> None:
    """Short requests included: there every visible entry is selected, no hidden one, and the rest is -1."""
    case = Case("small-deepseek", "gaussian", (300, 30, 3), rows=0, mode="decode", decode_tokens=9, overrides=SMALL)
    inputs = generate(case, LAYER["csa"])
    trace = path.run(inputs, case.id, upto="topk")
    assert int(inputs.visible.min()) < SMALL["index_topk"] < int(inputs.visible.max())
    for selected, scores, visible in zip(trace.value("topk"), trace.value("score"), inputs.visible, strict=True):
        count = min(SMALL["index_topk"], int(visible))
        picked = selected[:count].long()
        assert (picked >= 0).all() and (picked < visible).all() and len(picked.unique()) == count
        assert (selected[count:] == -1).all()
        assert torch.equal(scores[picked].sort().values, scores.sort().values[len(scores) - count :])
    hidden = torch.arange(trace.value("score").shape[1]) >= inputs.visible[:, None]
    trace.stages["score"] = {"value": trace.value("score").masked_fill(hidden, 1e9)}
    assert torch.equal(path.stage("topk", inputs, trace)["value"], trace.value("topk"))
