"""The dyadic family: what rounding leaves alone, stage by stage, with and without every format's rounding."""

import pytest
import torch
from difftest.cases.case import Case
from difftest.cases.dyadic import EXACT_STAGES, QUERY_SIZE, exact_stages
from difftest.cases.generate import generate
from difftest.reference import oracle
from difftest.reference.config import load_config
from difftest.reference.formats import FORMATS
from difftest.reference.inputs import LayerInputs
from torch import Tensor

from difftest.paths.base import get_path
from difftest.trace import Trace

HEADS = {"64 heads": {}, "32 heads": {"index_n_heads": 32}}
KINDS = {"csa": 2, "hca": 3, "swa": 0}
BIAS = 2**0.5 / QUERY_SIZE
"""What rounding a query to powers of two multiplies it by."""


def inputs_of(kind: str = "csa", **fields: object) -> LayerInputs:
    fields = {"mode": "decode", "decode_tokens": 2} | fields
    return generate(Case("dyadic-test", "dyadic", (4217, 4438), **fields), KINDS[kind])  # type: ignore[arg-type]


def test_pooling_and_norm_are_exact() -> None:
    inputs = inputs_of()
    assert inputs.index is not None
    pooled = oracle.compressed(inputs)
    assert torch.equal(pooled, pooled.bfloat16().double())
    assert torch.equal(pooled.square().mean(1), torch.full((len(pooled),), 4.0**20, dtype=torch.float64))
    weighed = pooled / 2.0**20 * inputs.index.norm_weight.double()
    assert len(weighed.abs().unique()) == 2, "0 and one magnitude, sqrt(2) in fp32"


def test_slots_and_gates_differ_so_that_a_lost_slot_shows() -> None:
    inputs = inputs_of()
    assert inputs.index is not None
    kv_score = inputs.index.kv_score[:400]
    for columns in (slice(0, 128), slice(128, 256), slice(256, 384), slice(384, 512)):
        block = kv_score[:, columns].view(-1, 4, 128)
        assert (block != block[:, :1]).any(2).float().mean() > 0.7


@pytest.mark.parametrize("name", ["bf16", "e4m3fn", "e2m1"])
def test_key_elements_are_representable_in_every_format(name: str) -> None:
    inputs = inputs_of()
    keys = oracle.index_k(inputs, oracle.compressed(inputs)).float().double()
    assert (keys.square().mean(1) > 0).all()
    assert torch.equal(FORMATS[name].round(keys), keys)
    nonzero = keys[keys != 0].abs().unique()
    assert torch.equal(nonzero, 2.0 ** nonzero.log2().round())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("name", ["deepseek", "sglang-fp8-model", "sglang-fp4-model"])
def test_exact_stages_are_equal_bit_for_bit(name: str, heads: str, kind: str) -> None:
    inputs = inputs_of(kind, overrides=HEADS[heads])
    exact = oracle.run(inputs)
    trace = get_path(name).run(inputs, "dyadic-test")
    raw_scale = name == "sglang-fp8-model"
    checked = 0
    for stage in exact_stages(inputs.config):
        if stage not in exact or (stage == "index_k" and raw_scale):
            continue
        for part, want in exact[stage].items():
            if part != "lse":
                got = trace[stage][part]
                if stage == "topk":
                    got, want = got.sort(dim=1).values, want.sort(dim=1).values
                assert torch.equal(got.float(), want.float()), f"{stage} {part}"
                checked += 1
    assert checked >= {"csa": 5, "hca": 3, "swa": 2}[kind]


def test_a_raw_scale_leaves_the_codes_exact() -> None:
    inputs = inputs_of()
    trace = get_path("sglang-fp8-model").run(inputs, "dyadic-test", upto="index_q")
    decoded = trace["index_k"]["codes"].view(torch.float8_e4m3fn).float()
    assert set(decoded.abs().unique().tolist()) <= {0.0, 448.0}


def common_factor(got: Tensor, want: Tensor) -> tuple[float, float]:
    nonzero = want.abs() > 1e-9
    ratio = got[nonzero].double() / want[nonzero].double()
    assert (got[~nonzero].abs() < 1e-9).all()
    return float(ratio.min()), float(ratio.max())


@pytest.mark.parametrize(
    "name, factor, spread",
    [("deepseek", BIAS, 2**-7), ("sglang-fp8-model", 1.0, 2**-21), ("sglang-fp4-model", BIAS, 2**-21)],
)
def test_queries_and_scores_are_exact_up_to_one_factor(name: str, factor: float, spread: float) -> None:
    inputs = inputs_of()
    exact = oracle.run(inputs)
    trace: Trace = get_path(name).run(inputs, "dyadic-test")
    low, high = common_factor(trace["index_q"]["value"], exact["index_q"]["value"])
    assert low == pytest.approx(factor, rel=1e-7) and high / low - 1 < 1e-7
    if factor != 1:
        levels = trace["index_q"]["value"].abs().unique()
        assert torch.equal(levels[1:], 2.0 ** levels[1:].log2().round()), "powers of two once rounded"
    visible = exact["score"]["value"].isfinite()
    low, high = common_factor(trace["score"]["value"][visible], exact["score"]["value"][visible])
    assert low == pytest.approx(factor, abs=5e-3)
    assert high / low - 1 < spread, "the rounding of one product: of bf16 in deepseek, of fp32 elsewhere"


def test_selection_is_decided_by_a_factor_of_two() -> None:
    inputs = inputs_of()
    k = inputs.config.index_topk
    score = oracle.run(inputs)["score"]["value"]
    ordered = score.sort(dim=1, descending=True).values
    assert (ordered[:, k - 1] >= 1.99 * ordered[:, k]).all() and (ordered[:, k] > 0).all()
    chosen = oracle.topk(inputs, score)
    assert len({tuple(row) for row in chosen.tolist()}) >= len(chosen) - 1, "rows select different entries"


def test_attention_is_the_mean_of_two_latents() -> None:
    inputs = inputs_of()
    stages = oracle.run(inputs)
    out = stages["attention"]["value"]
    near = stages["kv"]["window"].float()
    selected = stages["topk"]["value"].long()
    for row in range(len(out)):
        offset = inputs.entry_offset[int(inputs.row_request[row])]
        far = stages["kv"]["compressed"][offset + selected[row]].float()
        for head in (0, 1, 2, 3):
            twice = 2 * out[row, head].float()
            partner = twice - near[inputs.window_index[row]]
            assert any((far == wanted).all(1).any() for wanted in partner), (row, head)


def test_exact_stages_name_head_weight_only_where_the_scale_is_a_power_of_two() -> None:
    assert "head_weight" not in exact_stages(load_config("v4-flash"))
    assert exact_stages(
        Case("x", "dyadic", (9,), overrides={"index_n_heads": 32}).config
    ).keys() - EXACT_STAGES.keys() == {"head_weight"}


def test_other_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="32 or 64 index heads, not 4"):
        inputs_of(overrides={"index_n_heads": 4})
    with pytest.raises(ValueError, match="head dims 128 and 512"):
        inputs_of(overrides={"head_dim": 128})
