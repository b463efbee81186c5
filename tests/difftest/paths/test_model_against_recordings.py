"""The torch model held to what SGLang's CUDA kernels computed: each stage is fed the recorded upstream stages."""

import pytest
import torch
from difftest.cases.generate import generate
from difftest.reference.attention import attention_magnitude, attn_query, packed_selection
from difftest.reference.indexer import score_magnitude_layer
from difftest.reference.inputs import LayerInputs
from difftest.reference.rope import rope_table
from torch import Tensor

from difftest.paths.flashmla_layout import BLOCKS, DATA_BYTES, NOPE_DIMS
from difftest.paths.recorded import SHIPPED, Recorded
from difftest.paths.sglang_fp8_model import SglangFp8Model
from difftest.recording import recipe
from difftest.trace import Trace

FILES = sorted(SHIPPED.glob("*.safetensors"))
FP32 = 2.0**-24
CODES_EQUAL = 0.9999
"""Share of the codes of a stage that the model makes alike; the others are one step off."""
POOL_BOUND = 16 * FP32
"""Of the norm: 8 approximate exponentials of 2 ulp, products, sums and an approximate division."""
SCALE_BOUND = 16 * FP32
"""Relative: a key's norm, rotation and seven butterflies in fp32, in another order."""
SCORE_BOUND = 4 * 2.0**-13
"""Of the sum of absolute terms: 4 steps of 32 products, each aligned to 14 bits of the running sum."""
OUTPUT_BOUND = 2.0**-7
"""Of the sum of absolute terms: both sides round probabilities and output to bf16, 2^-9 each."""
LSE_BOUND = 1e-3
"""Absolute: a logit moves by 2^-8 |q k| 512^-0.5 when a query element rounds to the other bf16, 2e-4 at q = k = 1."""

Run = tuple[LayerInputs, Trace]
needs_recordings = pytest.mark.skipif(not FILES, reason="no recordings shipped: `difftest record` on a GPU makes them")


def load(name: str) -> Run:
    case, _, layer = name.rpartition("-layer")
    trace = Recorded().recording(case, int(layer))
    return generate(recipe(trace), int(layer)), trace


@pytest.fixture(scope="module", params=[file.stem for file in FILES] or ["none"])
def run(request: pytest.FixtureRequest) -> Run:
    return load(request.param)


def model(run: Run, stage: str) -> dict[str, Tensor]:
    """The model's tensors of `stage`, its upstream taken from the recording; skips a kind without that stage."""
    inputs, trace = run
    if stage not in trace:
        pytest.skip(f"a {inputs.kind} layer has no stage {stage}")
    return SglangFp8Model().stage(stage, inputs, trace)  # type: ignore[arg-type]


def assert_codes_close(got: Tensor, want: Tensor, what: str) -> None:
    """e4m3 codes uint8: none more than a step apart, `CODES_EQUAL` of them alike (one of few may always differ)."""

    def order(code: Tensor) -> Tensor:
        return torch.where(code >= 128, 128 - code.int(), code.int())

    distance = (order(got) - order(want)).abs()
    assert int(distance.max()) <= 1, what
    assert int((distance > 0).sum()) <= max(1, (1 - CODES_EQUAL) * distance.numel()), what


@needs_recordings
def test_pooling(run: Run) -> None:
    got, want = model(run, "compressed")["value"], run[1].value("compressed")
    assert float((got - want).norm()) <= POOL_BOUND * float(want.norm())


@needs_recordings
@pytest.mark.parametrize("stage", ["index_k", "index_q"])
def test_codes_and_scales(run: Run, stage: str) -> None:
    got = model(run, stage)
    want = run[1].stages[stage]  # type: ignore[index]
    assert_codes_close(got["codes"], want["codes"], stage)
    assert bool(((got["scale"] - want["scale"]).abs() <= SCALE_BOUND * want["scale"]).all())


@needs_recordings
def test_head_weight(run: Run) -> None:
    got, want = model(run, "head_weight")["value"], run[1].value("head_weight")
    assert bool(((got - want).abs() <= 5 * FP32 * want.abs()).all())


@needs_recordings
def test_scores(run: Run) -> None:
    inputs, trace = run
    got, want = model(run, "score")["value"], trace.value("score")
    key, query, weight = (trace.value(stage).double() for stage in ("index_k", "index_q", "head_weight"))
    magnitude = score_magnitude_layer(inputs, query, key, weight)
    seen = want.isfinite()
    assert torch.equal(seen, got.isfinite())
    assert bool(((got - want).abs()[seen] <= SCORE_BOUND * magnitude[seen]).all())


@needs_recordings
def test_selection_is_the_same_but_for_ties_at_the_cut(run: Run) -> None:
    got, want, score = model(run, "topk")["value"], run[1].value("topk"), run[1].value("score")
    for row in range(len(got)):
        mine, theirs = (chosen[row][chosen[row] >= 0].long() for chosen in (got, want))
        assert torch.equal(score[row][mine].sort().values, score[row][theirs].sort().values)
        assert len(set(theirs.tolist())) == len(theirs)


@needs_recordings
@pytest.mark.parametrize("name", ["window", "compressed"])
def test_cache_bytes_of_latents(run: Run, name: str) -> None:
    if f"{name}_raw" not in run[1]["kv"]:
        pytest.skip(f"a {run[0].kind} layer has no {name} latents")
    got, want = model(run, "kv")[f"{name}_raw"], run[1]["kv"][f"{name}_raw"]
    scales = slice(DATA_BYTES, DATA_BYTES + BLOCKS)
    alike = (got[:, scales] == want[:, scales]).all(-1)
    assert int((~alike).sum()) <= max(1, (1 - CODES_EQUAL) * len(alike)), "scale bytes"
    assert_codes_close(got[alike, :NOPE_DIMS], want[alike, :NOPE_DIMS], name)
    rope, their_rope = (raw[:, NOPE_DIMS:DATA_BYTES].contiguous().view(torch.bfloat16).float() for raw in (got, want))
    assert bool(((rope - their_rope).abs() <= 2.0**-7 * their_rope.abs() + 1e-6).all()), "a bf16 step at most"
    assert (rope == their_rope).double().mean() >= 0.999


def magnitude_of(inputs: LayerInputs, trace: Trace) -> Tensor:
    """Sum of the absolute terms of the attention output, [R, A, C]."""
    config = inputs.config
    return attention_magnitude(
        attn_query(inputs.attn_query, config.rms_norm_eps, rope_table(config, inputs.kind, inputs.row_position)),
        trace["kv"]["window"].double(),
        inputs.window_index,
        trace["kv"]["compressed"].double(),
        packed_selection(inputs, trace.value("topk") if "topk" in trace else None),
        inputs.attn_sink,
        config.softmax_scale,
    )


@needs_recordings
def test_attention(run: Run) -> None:
    inputs, trace = run
    got, want = model(run, "attention"), trace["attention"]
    magnitude = magnitude_of(inputs, trace)
    assert bool(((got["value"] - want["value"]).abs() <= OUTPUT_BOUND * magnitude).all())
    assert bool(((got["lse"] - want["lse"]).abs() <= LSE_BOUND).all())


@needs_recordings
def test_scores_are_equal_bit_for_bit_with_the_tensor_cores_accumulator(run: Run) -> None:
    """All 32 bits of every score: the truncation of the accumulator and the order of heads are the H200's."""
    inputs, trace = run
    if "score" not in trace:
        pytest.skip(f"a {inputs.kind} layer has no scores")
    got = SglangFp8Model(accumulator="wgmma").stage("score", inputs, trace)["value"]
    assert torch.equal(got, trace.value("score"))
