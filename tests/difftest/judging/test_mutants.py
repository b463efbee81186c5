"""Every rule of the isolated check is tripped by a fault planted in its stage, and by no less."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from difftest.ball import nearest
from difftest.isolated import check_isolated
from difftest.policy import load_policy
from difftest.trace import Trace
from difftest.verdict import failure

POLICY = load_policy("default")


def bf16(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def chop_e4m3(codes: Tensor) -> Tensor:
    """Codes truncated towards zero to e4m3 instead of rounded."""
    step = torch.exp2(codes.abs().clamp(min=2.0**-6).log2().floor() - 3)
    return (codes / step).trunc() * step


def changed(index: tuple[object, ...], change) -> object:
    """A hook that changes one part of a tensor."""

    def hook(x: Tensor) -> Tensor:
        x = x.clone()
        x[index] = change(x[index])
        return x

    return hook


def half_split(x: Tensor) -> Tensor:
    """RoPE pairs taken from halves instead of neighbours, on what is already rotated: a wrong permutation."""
    tail = x[..., -64:]
    return torch.cat((x[..., :-64], tail.unflatten(-1, (32, 2)).transpose(-1, -2).flatten(-2)), -1)


def to_tf32(x: Tensor) -> Tensor:
    return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def negate(x: Tensor) -> Tensor:
    return -x


def roll_rows(x: Tensor) -> Tensor:
    return x.roll(1, 0)


PREPARATION = {
    "hadamard missing": {"hadamard": lambda x: x},
    "hadamard without its factor": {"hadamard": lambda x: x * 128**0.5},
    "position off by one": {"position": lambda p: p + 1},
    "position is the entry number": {"position": lambda p: p // 4},
    "pairs of halves": {"rotated": half_split},
    "one sign": {"transformed": changed((3, 5), lambda x: -x)},
    "neighbour's row": {"stored": roll_rows},
}

COMPRESSED = {
    "bias restarts its phase": {"gate": lambda g: g.roll(1, 1)},
    "overlap lost": {"gate": lambda g: torch.cat((torch.full_like(g[:, :4], -math.inf), g[:, 4:]), 1)},
    "missing block weighs 1": {"gate": lambda g: g.nan_to_num(neginf=0.0)},
    "rounded to bf16": {"pooled": bf16},
    "rounded to tf32": {"pooled": to_tf32},
    "one sign": {"pooled": changed((7, 3), negate)},
    "relative error 1e-5": {"pooled": lambda x: x * (1 + 1e-5)},
    "neighbour's entry": {"pooled": roll_rows},
}


@pytest.mark.parametrize("fault", COMPRESSED)
def test_compressed(bench, fault):
    assert failure(bench.check("compressed", "fp32", **COMPRESSED[fault]), POLICY)


@pytest.mark.parametrize("declares", ["fp32", "bf16", "fp8", "published"])
@pytest.mark.parametrize("stage", ["index_k", "index_q"])
@pytest.mark.parametrize("fault", PREPARATION)
def test_preparation(bench, stage, declares, fault):
    if stage == "index_q" and fault == "position is the entry number":
        pytest.skip("a query has no entry number")
    assert failure(bench.check(stage, declares, **PREPARATION[fault]), POLICY)


NORM = {
    "norm weight rounded to bf16": {"norm_weight": bf16},
    "normed key rounded to bf16": {"normed": bf16},
    "rotated key rounded to bf16": {"rotated": bf16},
    "transformed key rounded to bf16": {"transformed": bf16},
}


@pytest.mark.parametrize("declares", ["fp32", "fp8"])
@pytest.mark.parametrize("fault", NORM)
def test_undeclared_rounding_of_a_key(bench, declares, fault):
    assert failure(bench.check("index_k", declares, **NORM[fault]), POLICY)


@pytest.mark.parametrize("fault", ["normed", "rotated"])
def test_undeclared_rounding_before_a_bf16_key(bench, fault):
    assert failure(bench.check("index_k", "bf16", **{fault: bf16}), POLICY)


def test_missing_rounding_of_a_published_key(bench):
    """A path that declares bf16 steps and skips one is not the published one either."""
    declares = bench.declarations["published"]
    skipping = replace(declares, key=replace(declares.key, normed="none"))
    inputs, trace = bench.layer(), bench.clean("published")
    made = bench.model(skipping).stage("index_k", inputs, trace)
    mixed = Trace("small", inputs.layer, "model", {**trace.stages, "index_k": made})
    assert failure(check_isolated("index_k", inputs, mixed, declares), POLICY)


CODES = {
    "truncated": ({"codes": chop_e4m3}, "excess"),
    "read as the other flavour": ({"stored": lambda x: x / 2}, "readback"),
    "scale a power of two": ({"scale": lambda s: torch.exp2(s.log2().ceil())}, "excess"),
    "scale off by 2e-5": ({"scale": lambda s: s * (1 + 2e-5)}, "excess"),
    "scale without its floor's maximum": ({"scale": lambda s: s * (448 / 440)}, "excess"),
    "one code up": ({"stored": lambda x: x, "codes": changed((2, 0, 7), lambda c: c * 1.13)}, "excess"),
    "bytes of the neighbour": ({"bytes": roll_rows}, "readback"),
    "value off its grid": ({"stored": changed((2, 7), lambda x: x * 1.001)}, "grid"),
}


@pytest.mark.parametrize("fault", CODES)
def test_codes(bench, fault):
    hooks, rule = CODES[fault]
    record = bench.check("index_k", "fp8", **hooks)
    failed = failure(record, POLICY)
    assert failed
    assert failed.rule == rule or rule in {finding.rule for finding in record.findings}


def test_ties_go_to_the_even_code(bench):
    """Published keys sit exactly on ties of e2m1; rounding those down instead is seen although no bound is exceeded."""

    def ties_down(codes: Tensor) -> Tensor:
        step = torch.where(codes.abs() < 2, 0.5, torch.where(codes.abs() < 4, 1.0, 2.0))
        tie = (codes / step).frac().abs() == 0.5
        assert tie.any()
        return torch.where(tie, codes * (1 - 2.0**-10), codes)

    assert failure(bench.check("index_k", "published", codes=ties_down), POLICY)
    assert failure(bench.check("index_q", "published", codes=ties_down), POLICY)


WEIGHT = {
    "rounded to bf16": lambda w: bf16(w),
    "n_heads factor missing": lambda w: w * 6**0.5,
    "one sign": changed((4, 2), negate),
    "softmaxed": lambda w: w.softmax(-1),
}


@pytest.mark.parametrize("fault", WEIGHT)
def test_head_weight(bench, fault):
    assert failure(bench.check("head_weight", "fp32", weight=WEIGHT[fault]), POLICY)


def test_head_weight_must_be_rounded_where_declared(bench):
    assert failure(bench.check("head_weight", "published", weight=lambda w: w * (1 + 2.0**-9)), POLICY)


SCORE = {
    "head missing": ({"score_w": changed((slice(None), 3), torch.zeros_like)}, "excess"),
    "sign of one head weight": ({"score_w": changed((5, 1), negate)}, "excess"),
    "sign of one query element": ({"score_q": changed((5, 1, 77), negate)}, "excess"),
    "sign of one key element": ({"score_k": changed((9, 77), negate)}, "excess"),
    "keys off by one entry": ({"score_k": roll_rows}, "excess"),
    "relu missing": ({"relu": lambda dots: dots}, "excess"),
    "relu after the weight": ({"relu": lambda dots: dots, "terms": torch.relu}, "excess"),
    "mean over heads": ({"score": lambda s: s / 6}, "excess"),
    "dots rounded to bf16": ({"dots": bf16}, "excess"),
    "terms rounded to bf16": ({"terms": bf16}, "excess"),
    "score rounded to bf16": ({"score": bf16}, "excess"),
    "score rounded to fp16": ({"score": lambda s: s.half().float()}, "excess"),
}


@pytest.mark.parametrize("fault", SCORE)
def test_score(bench, fault):
    hooks, rule = SCORE[fault]
    failed = failure(bench.check("score", "fp32", **hooks), POLICY)
    assert failed
    assert failed.rule in (rule, "granularity", "rms")


def test_score_findings(bench):
    def rules(**hooks: object) -> set[str]:
        return {finding.rule for finding in bench.check("score", "fp32", **hooks).findings}

    assert rules(scores=changed((2, 5), lambda x: x * math.nan)) == {"nan"}
    assert rules(scores=changed((2, 5), lambda x: x * math.inf)) == {"inf"}
    assert rules(scores=lambda s: s.nan_to_num(neginf=0.0)) == {"mask"}
    assert rules(score=lambda s: s * 0) == {"constant_row"}
    assert "granularity" in rules(score=bf16)
    assert "granularity" in rules(score=lambda s: s.half().float())


def test_findings_name_tensor_and_position(bench):
    record = bench.check("score", "fp32", scores=changed((2, 5), lambda x: x * math.nan))
    assert "score[2, 5]" in record.findings[0].message
    assert record.findings[0].where == {"row": 2, "entry": 5}


WGMMA = {
    "head missing": {"score_w": changed((slice(None), 3), torch.zeros_like)},
    "sign of one head weight": {"score_w": changed((5, 1), negate)},
    "sign of one key element": {"score_k": changed((9, 77), negate)},
    "rounded to bf16": {"score": bf16},
}


@pytest.mark.parametrize("fault", WGMMA)
def test_score_of_the_fp8_tensor_core(bench, fault):
    declares = replace(bench.declarations["fp8"], score="fp8_wgmma")
    inputs, clean = bench.layer(), bench.clean("fp8")
    assert failure(check_isolated("score", inputs, clean, declares), POLICY) is None
    made = bench.model(declares, **WGMMA[fault]).stage("score", inputs, clean)
    mixed = Trace("small", inputs.layer, "model", {**clean.stages, "score": made})
    assert failure(check_isolated("score", inputs, mixed, declares), POLICY)


PUBLISHED_SCORE = {
    "kept in fp32": {"score": lambda s: s + 2.0**-14},
    "rounded up": {"score": lambda s: nearest("bf16", s.double() * (1 + 2.0**-7)).float()},
    "head missing": {"score_w": changed((slice(None), 3), torch.zeros_like)},
    "sign of one key element": {"score_k": changed((9, 77), negate)},
}


@pytest.mark.parametrize("fault", PUBLISHED_SCORE)
def test_published_score(bench, fault):
    assert failure(bench.check("score", "published", **PUBLISHED_SCORE[fault]), POLICY)
