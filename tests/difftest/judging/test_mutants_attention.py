"""Faults planted in latents and attention are seen at their stage."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from difftest.attention_check import judged_rows
from difftest.isolated import check_isolated
from difftest.policy import load_policy
from difftest.trace import Trace
from difftest.verdict import failure

POLICY = load_policy("default")


def bf16(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def chopped_bf16(x: Tensor) -> Tensor:
    return (x.view(torch.int32) & ~0xFFFF).view(torch.float32)


def chop_e4m3(codes: Tensor) -> Tensor:
    step = torch.exp2(codes.abs().clamp(min=2.0**-6).log2().floor() - 3)
    return (codes / step).trunc() * step


def roll_rows(x: Tensor) -> Tensor:
    return x.roll(1, 0)


LATENTS = {
    "codes truncated": {"codes": chop_e4m3},
    "scale twice as large": {"scale": lambda s: 2 * s},
    "scale not a power of two": {"scale": lambda s: s * 0.9},
    "tail truncated": {"tail": chopped_bf16},
    "tail at the wrong position": {"position": lambda p: p + 1},
    "norm weight rounded": {"norm_weight": bf16},
    "window off by one": {"window": roll_rows},
    "entries off by one": {"latents": roll_rows},
    "bias restarts its phase": {"gate": lambda g: g.roll(1, 1)},
    "nope off its grid": {"latents": lambda x: x * 1.001},
}


@pytest.mark.parametrize("fault", LATENTS)
def test_latents(bench, fault):
    if fault == "norm weight rounded":
        layer = bench.layer()
        assert not torch.equal(bf16(layer.main.norm_weight), layer.main.norm_weight)
    assert failure(bench.check("kv", "fp8", **LATENTS[fault]), POLICY)


@pytest.mark.parametrize("step", ["nope", "tail"])
def test_undeclared_rounding_of_latents(bench, step):
    assert failure(bench.check("kv", "fp32", **{step: bf16}), POLICY)


def test_missing_rounding_before_the_compressed_quantiser(bench):
    """SGLang rounds compressed latents to bf16 before e4m3, and window latents not."""
    declares = bench.declarations["fp8"]
    swapped = replace(declares, window=declares.latent, latent=declares.window)
    inputs, clean = bench.layer(), bench.clean("fp8")
    made = bench.model(swapped).stage("kv", inputs, clean)
    mixed = Trace("small", inputs.layer, "model", {**clean.stages, "kv": made})
    assert failure(check_isolated("kv", inputs, mixed, declares), POLICY)


def add_slot_zero(index: Tensor) -> Tensor:
    """The first -1 is taken as slot 0."""
    index = index.clone()
    padding = (index < 0).nonzero()
    if len(padding):
        index[tuple(padding[0])] = 0
    return index


def without_last(index: Tensor) -> Tensor:
    index = index.clone()
    if int((index >= 0).sum()) > 1:
        index[-1] = -1
    return index


def with_sink(lse: Tensor) -> Tensor:
    return torch.logaddexp(lse, torch.zeros(()))


ATTENTION = {
    "sink missing": {"sink": lambda s: torch.full_like(s, -math.inf)},
    "sink twice": {"sink": lambda s: s + math.log(2)},
    "sink of the next head": {"sink": lambda s: s.roll(1)},
    "window one short": {"near": without_last},
    "entries off by one": {"entries": lambda e: torch.where(e > 0, e - 1, e)},
    "minus one read as slot 0": {"entries": add_slot_zero},
    "scale off by 1 %": {"logit": lambda z: z * 1.01},
    "probabilities truncated to bf16": {"probability": chopped_bf16},
    "query rotated at the next position": {"position": lambda p: p + 1},
    "query of the next head": {"query": lambda q: q.roll(1, 1)},
    "one output sign": {"out": lambda o: torch.cat((-o[:1], o[1:]))},
    "log-sum-exp with the sink": {"lse": with_sink},
    "log-sum-exp in base 2": {"lse": lambda x: x / math.log(2)},
}


@pytest.mark.parametrize("declares", ["fp8", "fp32"])
@pytest.mark.parametrize("fault", ATTENTION)
def test_attention(bench, declares, fault):
    if fault == "minus one read as slot 0":
        assert (bench.clean(declares)["topk"]["value"] < 0).any()
    assert failure(bench.check("attention", declares, **ATTENTION[fault]), POLICY)


@pytest.mark.parametrize("kind", ["swa", "hca"])
@pytest.mark.parametrize("fault", ["sink missing", "window one short", "scale off by 1 %"])
def test_attention_of_other_layer_kinds(bench, kind, fault):
    assert failure(bench.check("attention", "fp8", kind, **ATTENTION[fault]), POLICY)


@pytest.mark.parametrize("step", ["probability", "query", "logit", "out"])
def test_undeclared_rounding_in_attention(bench, step):
    assert failure(bench.check("attention", "fp32", **{step: bf16}), POLICY)


def test_row_rule_sees_probabilities_rounded_without_declaration(bench):
    """The bound of a single element hides this noise; the norm of a row's error does not."""
    record = bench.check("attention", "fp32", probability=bf16)
    assert record.metrics["row_rms"] > 10 * record.bounds["row_rms"]


def test_output_that_is_not_finite(bench):
    record = bench.check("attention", "fp8", out=lambda o: o.index_fill(0, torch.tensor(3), math.nan))
    assert record.findings[0].rule == "nan"
    assert "attention[3, 0, 0]" in record.findings[0].message


def test_row_without_any_key(bench):
    """A row that attends to nothing is 0 with log-sum-exp -inf (contract K9); anything else is a finding."""
    inputs = bench.layer("swa")
    nothing = replace(inputs, window_index=torch.full_like(inputs.window_index, -1))
    clean = bench.clean("fp8", "swa")
    zero = {
        "value": torch.zeros_like(clean["attention"]["value"]),
        "lse": torch.full_like(clean["attention"]["lse"], -math.inf),
    }
    trace = Trace("small", inputs.layer, "model", {**clean.stages, "attention": zero})
    assert failure(check_isolated("attention", nothing, trace, bench.declarations["fp8"]), POLICY) is None
    zero["value"][2, 1, 5] = 1e-30
    record = check_isolated("attention", nothing, trace, bench.declarations["fp8"])
    assert [finding.rule for finding in record.findings] == ["empty_row"]
    zero["value"].zero_()
    zero["lse"][1] = 0.0
    record = check_isolated("attention", nothing, trace, bench.declarations["fp8"])
    assert [finding.rule for finding in record.findings] == ["empty_row"]


def test_invalid_selection_is_not_attentions_fault(bench):
    clean = bench.clean("fp8")
    wrong = clean["topk"]["value"].clone()
    wrong[4, 2] = 100_000
    trace = Trace("small", 2, "model", {**clean.stages, "topk": {"value": wrong}})
    record = check_isolated("attention", bench.layer(), trace, bench.declarations["fp8"])
    assert record.skipped.startswith("upstream topk[4, 2] is 100000")


def test_few_rows_are_all_judged_and_of_many_an_even_spread_with_the_last() -> None:
    elements = 64 * 512
    assert judged_rows(1024, 1024 * elements) == list(range(1024))
    many = judged_rows(22597, 22597 * elements)
    assert many[0] == 0 and many[-1] == 22596 and 512 <= len(many) <= 1025
    assert max(b - a for a, b in pairwise(many)) <= 45
    assert judged_rows(0, 0) == []
