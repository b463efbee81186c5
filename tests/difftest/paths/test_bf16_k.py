"""The bf16 path: the same bits in every mode, one rounding from the exact keys, and honest about what it cannot
read.
"""

from typing import Any

import pytest
import torch
from difftest.cases.case import Case, Mode
from difftest.cases.generate import generate
from difftest.kernels.layout import PAGE_BYTES, elements
from difftest.reference.formats import round_bf16
from difftest.reference.inputs import LayerInputs

from difftest.paths.base import CannotFeed, get_path
from difftest.paths.bf16_k import PAGE_PADDING, Bf16K, Bf16KNaive, entries_of_steps
from difftest.paths.oracle import Oracle
from difftest.trace import Trace

LENGTHS = (803, 5, 2311)
LAYER = 2


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def layer_inputs(mode: Mode = "prefill", **fields: Any) -> LayerInputs:
    fields = {"chunk": 511, "rows": 6, **fields}
    return generate(Case("bf16-k", "gaussian", LENGTHS, mode=mode, **fields), LAYER)


def scored(path: Bf16K, inputs: LayerInputs) -> Trace:
    return path.run(inputs, "bf16-k", upto="score")


@pytest.mark.parametrize("path", [Bf16K(), Bf16K(q="fp8"), Bf16KNaive()], ids=["q=bf16", "q=fp8", "naive"])
def test_one_rounding_from_the_oracle(path: Bf16K) -> None:
    """Keys (and bf16 queries) are the oracle's rounded once; an element may differ only where fp32 reaches across a
    tie.
    """
    inputs = layer_inputs()
    got, exact = scored(path, inputs), Oracle().run(inputs, "bf16-k", upto="score")
    stages = ["index_k"] + (["index_q"] if path.query_format == "bf16" else [])
    for stage in stages:
        wrong = got.value(stage).double() != round_bf16(exact.value(stage).double())  # type: ignore[arg-type]
        assert wrong.double().mean() < 1e-3
    score, want = got.value("score").double(), exact.value("score").double()
    assert torch.equal(score.isinf(), want.isinf())
    seen = want.isfinite()
    error = (score[seen] - want[seen]).norm() / want[seen].norm()
    assert error < (0.005 if path.query_format == "bf16" else 0.05)


@pytest.mark.parametrize("mode", ["chunked", "decode", "resume"])
def test_modes_store_the_same_bits(mode: Mode) -> None:
    whole, parts = layer_inputs(), layer_inputs(mode)
    pooled = {"value": torch.randn(whole.entry_offset[-1], 128)}
    caches = []
    for inputs in (whole, parts):
        trace = Trace("bf16-k", LAYER, "given", {"compressed": pooled})
        caches.append(Bf16K().index_k(inputs, trace))
    assert torch.equal(caches[0]["value"], caches[1]["value"])
    assert torch.equal(caches[0]["raw"], caches[1]["raw"])


@pytest.mark.parametrize("mode", ["prefill", "chunked", "decode", "resume"])
@pytest.mark.parametrize("pooled_prefix", [0, 1])
def test_steps_complete_every_entry_once(mode: Mode, pooled_prefix: int) -> None:
    inputs = layer_inputs(mode, pooled_prefix=pooled_prefix)
    parts = list(entries_of_steps(inputs))
    assert sorted(torch.cat(parts).tolist()) == list(range(inputs.entry_offset[-1]))
    assert len(parts) > 1 or (mode == "prefill" and not pooled_prefix)


def test_only_slots_are_written() -> None:
    inputs = layer_inputs("chunked")
    raw = scored(Bf16K(), inputs)["index_k"]["raw"]
    written = (~elements(raw).isnan()).sum()
    assert raw.shape == (inputs.num_pages, PAGE_BYTES + PAGE_PADDING)
    assert int(written) == inputs.entry_offset[-1] * 128
    assert (raw[:, PAGE_BYTES:] == 0xFF).all()


def test_naive_agrees_within_fp32() -> None:
    inputs = layer_inputs()
    ours, naive = (scored(path, inputs).value("score") for path in (Bf16K(), Bf16KNaive()))
    seen = ours.isfinite()
    assert torch.equal(seen, naive.isfinite())
    assert (ours[seen] - naive[seen]).abs().max() < 1e-4 * ours[seen].abs().max()


def test_scores_follow_substituted_keys_and_queries() -> None:
    """The kernel reads what the trace says, not what this path stored before."""
    inputs = layer_inputs()
    trace = scored(Bf16K(), inputs)
    base = trace.value("score")
    trace["index_k"]["value"] = -trace.value("index_k")
    flipped = Bf16K().score(inputs, trace)["value"]
    trace["index_q"]["value"] = -trace.value("index_q")
    assert not torch.equal(flipped, base)
    assert torch.equal(Bf16K().score(inputs, trace)["value"], base)


def test_fp8_queries_are_taken_exactly_and_other_values_refused() -> None:
    inputs = layer_inputs()
    trace = scored(Bf16K(), inputs)
    model = get_path("sglang-fp8-model")
    trace.stages["index_q"] = model.stage("index_q", inputs, trace)
    assert torch.equal(Bf16K().score(inputs, trace)["value"].isinf(), trace.value("score").isinf())
    trace.stages["index_k"] = model.stage("index_k", inputs, trace)
    with pytest.raises(CannotFeed, match=r"index_k\[0, 0\] is .* no bf16 number"):
        Bf16K().score(inputs, trace)


def test_declares_its_formats_and_its_siblings() -> None:
    sibling = get_path("sglang-fp8-model").declares
    for option, stored in (("bf16", "bf16"), ("fp8", "e4m3")):
        declares = get_path(f"bf16-k:q={option}").declares
        assert (declares.key.stored, declares.query.stored, declares.score) == ("bf16", stored, "fp32")
        assert (declares.window, declares.latent, declares.output) == (sibling.window, sibling.latent, sibling.output)


def test_unknown_option_values_are_named() -> None:
    with pytest.raises(ValueError, match="q=fp16 is unknown: choose one of bf16, fp8"):
        get_path("bf16-k:q=fp16")
    with pytest.raises(ValueError, match="store=cpp is unknown: choose one of triton, cuda"):
        get_path("bf16-k:store=cpp")
    with pytest.raises(ValueError, match="does not take"):
        get_path("bf16-k:colour=red")


def test_the_cuda_store_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    missing = get_path("bf16-k:store=cuda").availability()
    assert not missing.ok and "CUDA device" in missing.why and "store=triton" in missing.install
    assert get_path("bf16-k").availability().ok


def test_whole_layer_and_dense_layers_run() -> None:
    trace = get_path("bf16-k").run(layer_inputs(), "bf16-k")
    assert trace.value("attention").isfinite().all()
    dense = generate(Case("bf16-k", "gaussian", (300,), rows=2), 3)
    assert list(get_path("bf16-k").run(dense, "bf16-k").stages) == ["kv", "attention"]
