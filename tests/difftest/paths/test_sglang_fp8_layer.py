"""SGLang's backend, pool and indexer as one layer must agree with its operators called one by one. Needs a GPU."""

from dataclasses import replace

import pytest
import torch
from difftest.cases.case import Case
from difftest.cases.generate import generate
from difftest.cases.recorded_cases import RECORDED_CASES
from difftest.reference.inputs import LayerInputs

from difftest.paths.base import CannotFeed, get_path
from difftest.trace import Trace

AVAILABLE = get_path("sglang-fp8-layer").availability()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not AVAILABLE.ok, reason=f"{AVAILABLE.why} {AVAILABLE.install}")]

BITWISE = ("compressed", "index_k", "index_q", "head_weight", "score", "kv")
OUTPUT_BOUND = 2 * 2.0**-7
"""Of an output's size: both levels round probabilities and output to bf16, and may split and order keys differently."""
LSE_BOUND = 2.0**-12
CASES = {
    **{case.id: case for case in RECORDED_CASES},
    "gathered-8231": Case("gathered-8231", "gaussian", (8231,), rows=8, layers=(2,)),
    "prefix-16384": Case(
        "prefix-16384", "gaussian", (16601, 16510), mode="decode", pooled_prefix=4000, rows=4, layers=(2, 3)
    ),
}
Levels = tuple[LayerInputs, Trace, Trace]


@pytest.fixture(
    scope="module", params=[(name, layer) for name, case in CASES.items() for layer in case.layers], ids=str
)
def levels(request: pytest.FixtureRequest) -> Levels:
    """Inputs, the layer-level trace, and the operator-level trace that is given the layer's selection.

    The operators attend by the route that the backend takes for the rows: decode for decoded tokens, else prefill.
    """
    name, layer = request.param
    inputs = generate(CASES[name], layer).to("cuda")
    whole = get_path("sglang-fp8-layer").run(inputs, name)
    given = {"topk": whole["topk"]} if "topk" in whole else {}
    route = "decode" if CASES[name].mode == "decode" else "prefill"
    operators = get_path(f"sglang-fp8:attention={route}").run(inputs, name, replace(whole, stages=given))
    return inputs, whole, operators


def test_every_stage_before_the_selection_is_bitwise_equal(levels: Levels) -> None:
    _, whole, operators = levels
    print(f"{whole.case} layer {whole.layer}: {whole.facts['routes']}")
    for stage in BITWISE:
        if stage in whole:
            for name in ("value", "codes", "scale", "folded", "window", "compressed"):
                if name in whole[stage]:
                    assert torch.equal(whole[stage][name].nan_to_num(), operators[stage][name].nan_to_num()), (
                        f"{stage}.{name}"
                    )


def test_the_selection_is_the_operators_own(levels: Levels) -> None:
    inputs, whole, operators = levels
    if "topk" not in whole:
        pytest.skip(f"a {inputs.kind} layer selects nothing")
    own = get_path("sglang-fp8").stage("topk", inputs, replace(operators, stages={"score": operators["score"]}))[
        "value"
    ]
    score = operators.value("score")
    for row, count in enumerate(inputs.visible.tolist()):
        kept, expected = whole.value("topk")[row], own[row]
        kept, expected = kept[kept >= 0].long(), expected[expected >= 0].long()
        assert len(kept) == len(expected) == min(count, inputs.config.index_topk)
        assert bool((kept < count).all()) and len(kept.unique()) == len(kept)
        assert torch.equal(score[row, kept].sort().values, score[row, expected].sort().values)


def test_attention_agrees(levels: Levels) -> None:
    _, whole, operators = levels
    got, want = whole["attention"]["value"], operators["attention"]["value"]
    error = float(((got - want).abs() / want.abs().amax(-1, keepdim=True)).max())
    lse = float((whole["attention"]["lse"] - operators["attention"]["lse"]).abs().max())
    print(
        f"{whole.case} layer {whole.layer} attention: error {error:.3g}, lse {lse:.3g}, equal {torch.equal(got, want)}"
    )
    assert error <= OUTPUT_BOUND and lse <= LSE_BOUND


@pytest.mark.parametrize("spec", ["sglang-fp8-layer:topk=v1", "sglang-fp8-layer:topk=torch"])
def test_other_topk_kernels_select_equally_good_entries(spec: str) -> None:
    case = next(case for case in RECORDED_CASES if case.mode == "resume")
    inputs = generate(case, case.layers[0]).to("cuda")
    trace = get_path(spec).run(inputs, case.id, upto="topk")
    score = trace.value("score")
    for row, count in enumerate(inputs.visible.tolist()):
        kept = trace.value("topk")[row]
        kept = kept[kept >= 0].long()
        best = score[row, :count].topk(min(count, inputs.config.index_topk)).values
        assert torch.equal(score[row, kept].sort().values, best.sort().values)


def test_a_substituted_stage_is_refused() -> None:
    case = RECORDED_CASES[-1]
    inputs = generate(case, 2).to("cuda")
    path = get_path("sglang-fp8-layer")
    trace = path.run(inputs, case.id, upto="head_weight")
    trace.stages["index_k"] = {"value": trace.value("index_k") + 1}
    with pytest.raises(CannotFeed, match="index_k"):
        path.stage("score", inputs, trace)
