"""SGLang's own kernels against fp64, stage by stage, each fed with the path's own upstream tensors. Needs a GPU."""

import json
from dataclasses import replace

import pytest
import torch
from difftest.cases.case import Case
from difftest.cases.generate import generate
from difftest.cases.recorded_cases import RECORDED_CASES
from difftest.reference import oracle
from difftest.reference.attention import attention_magnitude, packed_selection, sparse_attention
from difftest.reference.formats import dequantise, quantise, round_bf16
from difftest.reference.indexer import score_magnitude_layer
from difftest.reference.inputs import LayerInputs
from difftest.reference.norm import rms_norm
from difftest.reference.rope import rope_table, rotate
from torch import Tensor

from difftest.paths.base import get_path
from difftest.paths.flashmla_layout import NOPE_DIMS
from difftest.trace import Trace

AVAILABLE = get_path("sglang-fp8").availability()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not AVAILABLE.ok, reason=f"{AVAILABLE.why} {AVAILABLE.install}")]

FP32 = 2.0**-24
POOL_BOUND = 16 * FP32
"""Of the norm: 8 approximate exponentials (2 ulp), 8 products and sums, one approximate division."""
WEIGHT_BOUND = 5 * FP32
"""Constant, two products and the division that takes the query scale out: a half ulp each, and one to spare."""
SCORE_BOUND = 4 * 2.0**-13
"""Of the sum of absolute terms: 4 steps of 32 products, each aligned to 14 bits of the running sum."""
OUTPUT_BOUND = 2.0**-7 + 2.0**-12
"""Of the sum of absolute terms: probabilities and the output are each rounded to bf16 (2^-8), sums are fp32."""
LSE_BOUND = 2.0**-12
"""Absolute: fp32 products and sums of 512 terms, and exp2 of a scaled score."""
CODES_EQUAL = 0.9999

CASES = {
    **{case.id: case for case in RECORDED_CASES},
    "prefix-16384": Case("prefix-16384", "gaussian", (16601, 16510), mode="decode", pooled_prefix=4000, rows=4),
}
Run = tuple[LayerInputs, Trace]


@pytest.fixture(
    scope="module", params=[(name, layer) for name, case in CASES.items() for layer in case.layers[:2]], ids=str
)
def run(request: pytest.FixtureRequest) -> Run:
    """Inputs and the live trace of one case and layer, both on the CPU."""
    name, layer = request.param
    inputs = generate(CASES[name], layer)
    return inputs, _on_cpu(get_path("sglang-fp8").run(inputs.to("cuda"), name))


def _on_cpu(trace: Trace) -> Trace:
    stages = {stage: {name: part.cpu() for name, part in parts.items()} for stage, parts in trace.stages.items()}
    return Trace(trace.case, trace.layer, trace.path, stages, trace.facts)


def _say(what: str, **figures: float) -> None:
    print(f"{what:40}", "  ".join(f"{name} {value:.3g}" for name, value in figures.items()))


def _needs(run: Run, stage: str) -> Run:
    if stage not in run[1]:
        pytest.skip(f"a {run[0].kind} layer has no stage {stage}")
    return run


def _code_figures(codes: Tensor, exact: Tensor, scale: Tensor, want_scale: Tensor) -> tuple[float, int, float]:
    """Share of equal e4m3 codes, largest distance in codes, largest relative error of the scale."""
    want = exact.to(torch.float8_e4m3fn).view(torch.int8).int()
    got = codes.view(torch.int8).int()
    distance = torch.where((got < 0) == (want < 0), (got - want).abs(), (got & 127) + (want & 127))
    error = (scale.double() - want_scale).abs() / want_scale
    return float((distance == 0).double().mean()), int(distance.max()), float(error.max())


def test_pooling(run: Run) -> None:
    inputs, trace = _needs(run, "compressed")
    want = oracle.compressed(inputs)
    error = float((trace.value("compressed").double() - want).norm() / want.norm()) if len(want) else 0.0
    _say(f"{trace.case} pooling", relative=error)
    assert error <= POOL_BOUND


def test_index_key_codes(run: Run) -> None:
    inputs, trace = _needs(run, "index_k")
    want, want_scale = quantise(oracle.index_k(inputs, trace.value("compressed")), "e4m3")
    equal, distance, scale = _code_figures(trace["index_k"]["codes"], want, trace["index_k"]["scale"], want_scale)
    _say(f"{trace.case} index_k", equal=equal, distance=distance, scale=scale)
    assert equal >= CODES_EQUAL and distance <= 1 and scale <= POOL_BOUND


def test_index_query_codes_and_head_weight(run: Run) -> None:
    inputs, trace = _needs(run, "index_q")
    want, want_scale = quantise(oracle.index_q(inputs), "e4m3")
    equal, distance, scale = _code_figures(trace["index_q"]["codes"], want, trace["index_q"]["scale"], want_scale)
    weight = oracle.head_weight(inputs)
    error = float(((trace.value("head_weight").double() - weight).abs() / weight.abs().clamp_min(1e-30)).max())
    _say(f"{trace.case} index_q", equal=equal, distance=distance, scale=scale, weight=error)
    assert equal >= CODES_EQUAL and distance <= 1 and scale <= POOL_BOUND and error <= WEIGHT_BOUND


def _score_error(inputs: LayerInputs, trace: Trace, score: Tensor) -> float:
    parts = (trace.value("index_q"), trace.value("index_k"), trace.value("head_weight"))
    want = oracle.score(inputs, parts[1], parts[0], parts[2])
    magnitude = score_magnitude_layer(inputs, *parts)
    seen = torch.isfinite(want)
    assert torch.equal(seen, torch.isfinite(score)), "a score past visible, or a visible score that is no number"
    return float(((score.double() - want).abs() / magnitude)[seen].max()) if bool(seen.any()) else 0.0


def test_scores(run: Run) -> None:
    inputs, trace = _needs(run, "score")
    error = _score_error(inputs, trace, trace.value("score"))
    _say(f"{trace.case} score", error=error)
    assert error <= SCORE_BOUND


def test_gathered_keys_give_the_paged_scores(run: Run) -> None:
    inputs, trace = _needs(run, "score")
    given = Trace(
        trace.case, trace.layer, trace.path, {name: trace[name] for name in ("index_k", "index_q", "head_weight")}
    )
    given = _to_cuda(given)
    nonpaged = get_path("sglang-fp8:score=nonpaged").stage("score", inputs.to("cuda"), given)["value"].cpu()
    error = _score_error(inputs, trace, nonpaged)
    _say(f"{trace.case} score, keys gathered", error=error)
    assert error <= SCORE_BOUND


def _to_cuda(trace: Trace) -> Trace:
    stages = {stage: {name: part.cuda() for name, part in parts.items()} for stage, parts in trace.stages.items()}
    return Trace(trace.case, trace.layer, trace.path, stages)


@pytest.mark.parametrize("kind", ["v1", "v2", "torch"])
def test_topk_is_exact(run: Run, kind: str) -> None:
    inputs, trace = _needs(run, "topk")
    given = _to_cuda(Trace(trace.case, trace.layer, trace.path, {"score": trace["score"]}))
    out = get_path(f"sglang-fp8:topk={kind}").stage("topk", inputs.to("cuda"), given)
    score, visible, k = trace.value("score"), inputs.visible, inputs.config.index_topk
    _say(f"{trace.case} topk {kind} {json.loads(given.facts['topk'])['rows by branch']}")
    for row, count in enumerate(visible.tolist()):
        entries, slots = out["value"][row].cpu().long(), out["slots"][row].cpu().long()
        kept = entries[entries >= 0]
        assert len(kept) == len(kept.unique()) == min(count, k) and bool((kept < count).all())
        left = torch.ones(count, dtype=torch.bool)
        left[kept] = False
        if bool(left.any()):
            assert score[row, :count][left].max() <= score[row, kept].min()
        page = inputs.page_table[inputs.row_request[row]]
        assert torch.equal(
            slots[entries >= 0], page[kept // inputs.page_size] * inputs.page_size + kept % inputs.page_size
        )
        assert bool((slots[entries < 0] == -1).all())


def _latent_figures(got: Tensor, exact: Tensor, round_first: bool) -> tuple[float, float, float]:
    """Share of equal no-RoPE values, their largest error in units of the scale, largest RoPE error in bf16 ulps."""
    nope = exact[:, :NOPE_DIMS]
    codes, scale = quantise(round_bf16(nope) if round_first else nope, "e4m3_pow2")
    want = dequantise(codes, scale)
    steps = (got[:, :NOPE_DIMS].double() - want).abs() / scale.repeat_interleave(64, -1)
    tail = round_bf16(exact[:, NOPE_DIMS:])
    pair = exact[:, NOPE_DIMS:].unflatten(-1, (-1, 2)).norm(dim=-1).repeat_interleave(2, -1)
    ulp = (got[:, NOPE_DIMS:].double() - tail).abs() / (tail.abs() * 2.0**-7 + pair * 16 * FP32)
    return float((steps == 0).double().mean()), float(steps.max()), float(ulp.max())


def test_latents(run: Run) -> None:
    inputs, trace = run
    parts = [("window", oracle.window(inputs), False)]
    if sum(inputs.entries):
        parts.append(("compressed", oracle.compressed_latent(inputs), True))
    for name, exact, rounded in parts:
        equal, steps, ulp = _latent_figures(trace["kv"][name], exact, rounded)
        _say(f"{trace.case} {inputs.kind} kv.{name}", equal=equal, scales=steps, rope_ulp=ulp)
        assert equal >= 0.999 and steps <= 32 and ulp <= 1


def _declared_query(inputs: LayerInputs) -> Tensor:
    """The exact attention query with the declared roundings: to bf16 after the norm, and after RoPE."""
    normed = round_bf16(rms_norm(inputs.attn_query, None, inputs.config.rms_norm_eps))
    table = rope_table(inputs.config, inputs.kind, inputs.row_position)
    return round_bf16(rotate(normed, table.unsqueeze(1)))


@pytest.mark.parametrize("route", ["decode", "prefill"])
def test_attention(run: Run, route: str) -> None:
    inputs, trace = run
    stages = ("kv", "topk") if inputs.kind == "csa" else ("kv",)
    given = _to_cuda(Trace(trace.case, trace.layer, trace.path, {stage: trace[stage] for stage in stages}))
    out = get_path(f"sglang-fp8:attention={route}").stage("attention", inputs.to("cuda"), given)
    topk = trace.value("topk") if inputs.kind == "csa" else None
    window, compressed = trace["kv"]["window"].double(), trace["kv"]["compressed"].double()
    rest = (
        window,
        inputs.window_index,
        compressed,
        packed_selection(inputs, topk),
        inputs.attn_sink,
        inputs.config.softmax_scale,
    )
    query = _declared_query(inputs)
    want, lse = sparse_attention(query, *rest)
    magnitude = attention_magnitude(query, *rest)
    error = float(((out["value"].cpu().double() - want).abs() / magnitude).max())
    lse_error = float((out["lse"].cpu().double() - lse).abs().max())
    _say(f"{trace.case} {inputs.kind} attention {route}", error=error, lse=lse_error)
    assert error <= OUTPUT_BOUND and lse_error <= LSE_BOUND


def test_a_second_run_is_bitwise_equal(run: Run) -> None:
    """Every stage but the order of a selection, which top-k leaves to its atomics; attention is fed the first one."""
    inputs, trace = run
    given = {"topk": trace["topk"]} if "topk" in trace else {}
    again = get_path("sglang-fp8").run(inputs.to("cuda"), trace.case, _to_cuda(replace(trace, stages=given)))
    for stage, parts in _on_cpu(again).stages.items():
        for name, tensor in parts.items():
            assert torch.equal(tensor.nan_to_num(), trace[stage][name].nan_to_num()), f"{stage}.{name}"


@pytest.mark.parametrize("kind", ["v1", "v2", "torch"])
def test_topk_of_long_rows_takes_every_branch(kind: str) -> None:
    """Scores of 8 to 40,000 entries through each kernel's own branches; exact values, so compared with torch."""
    lengths = torch.tensor([8, 512, 513, 8192, 9000, 16_385, 32_768, 32_769, 40_000])
    inputs = generate(Case("rows", "gaussian", (160_000,), rows=1, pooled_prefix=39_999), 2)
    inputs = replace(inputs, row_request=torch.zeros_like(lengths), row_position=lengths * 4 - 1)
    score = torch.randn(len(lengths), 40_000, generator=torch.Generator().manual_seed(8))
    given = Trace("rows", 2, "x", {"score": {"value": score.cuda()}})
    out = get_path(f"sglang-fp8:topk={kind}").stage("topk", inputs.to("cuda"), given)["value"].cpu().long()
    _say(f"long rows, topk {kind}: {json.loads(given.facts['topk'])['rows by branch']}")
    for row, count in enumerate(lengths.tolist()):
        want = score[row, :count].topk(min(512, count)).indices
        assert set(out[row][out[row] >= 0].tolist()) == set(want.tolist()), f"row of {count} entries"


MILLION = Case(
    "million",
    "gaussian",
    (1_048_576,),
    mode="decode",
    decode_tokens=8,
    pooled_prefix=262_140,
    layers=(2,),
)


def test_a_million_tokens_of_context() -> None:
    """262,144 entries, 8 decoded rows: keys, scores, the cluster branch of top-k, and the layer level beside them."""
    inputs = generate(MILLION, 2).to("cuda")
    trace = get_path("sglang-fp8").run(inputs, MILLION.id, upto="topk")
    want, want_scale = quantise(oracle.index_k(inputs, trace.value("compressed")), "e4m3")
    stored = trace["index_k"]
    equal, distance, scale = _code_figures(stored["codes"].cpu(), want.cpu(), stored["scale"].cpu(), want_scale.cpu())
    error = _score_error(inputs, trace, trace.value("score"))
    branches = json.loads(trace.facts["topk"])["rows by branch"]
    _say(f"million index_k, score, topk {branches}", equal=equal, distance=distance, scale=scale, error=error)
    assert equal >= CODES_EQUAL and distance <= 1 and scale <= POOL_BOUND and error <= SCORE_BOUND
    assert set(branches) == {"cluster"}
    score, kept = trace.value("score"), trace.value("topk").long()
    assert torch.equal(score.gather(1, kept).sort().values, score.topk(kept.shape[1]).values.sort().values)
    layer = get_path("sglang-fp8-layer").run(inputs, MILLION.id, upto="score")
    assert torch.equal(layer.value("score"), score)
