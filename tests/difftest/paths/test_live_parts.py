"""What the live SGLang paths do around the kernels: locations, formats, branches. Runs on any machine."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from difftest.cases.case import Case
from difftest.cases.generate import generate
from difftest.cases.recorded_cases import RECORDED_CASES
from difftest.reference.inputs import LayerInputs, Span

from difftest.paths._live_attention import compressed_cache, left_packed, packed_entries, window_cache
from difftest.paths._live_compressor import LiveCompressor, calls_of, is_decode
from difftest.paths._live_feed import decode_e4m3, folded_weight, fp8_rows, latent_parts
from difftest.paths._live_sglang import check_dims, live_availability
from difftest.paths._live_topk import v2_branch
from difftest.paths._recorded_format import compact, expand
from difftest.paths.base import CannotFeed, get_path
from difftest.paths.flashmla_layout import dequantise
from difftest.stages import StageName
from difftest.trace import Trace


def test_a_long_step_becomes_calls_without_a_repeated_request() -> None:
    steps = ((Span(0, 0, 7), Span(1, 2, 5), Span(2, 0, 9)), (Span(0, 7, 8),))
    calls = list(calls_of(steps, limit=6))
    assert [sum(span.stop - span.start for span in call) for call in calls] == [6, 6, 6, 1, 1]
    for call in calls:
        requests = [span.request for span in call]
        assert len(requests) == len(set(requests))
    for request, tokens in ((0, range(8)), (1, range(2, 5)), (2, range(9))):
        seen = [t for call in calls for span in call if span.request == request for t in range(span.start, span.stop)]
        assert seen == list(tokens)


def test_decode_is_one_token_with_a_history() -> None:
    assert is_decode((Span(0, 9, 10), Span(1, 3, 4)))
    assert not is_decode((Span(0, 9, 10), Span(1, 0, 1)))
    assert not is_decode((Span(0, 9, 11),))


@pytest.mark.parametrize("layer", [2, 3])
def test_a_tokens_location_divided_by_the_ratio_is_its_entrys_slot(layer: int) -> None:
    inputs = generate(Case("slots", "gaussian", (1290, 517, 3), rows=4), layer)
    compressor = LiveCompressor(inputs)
    slots = [
        compressor.req_to_token[request, position] // inputs.ratio
        for request, count in enumerate(inputs.entries)
        for position in range(inputs.ratio - 1, count * inputs.ratio, inputs.ratio)
    ]
    assert torch.equal(torch.stack(slots).long(), inputs.entry_slot)
    used = [compressor.req_to_token[request, :length] for request, length in enumerate(inputs.lengths)]
    everything = torch.cat(used)
    assert len(everything.unique()) == len(everything), "two tokens share a location"
    assert int(everything.max()) < compressor.locations


def _fp8_stage(rows: int = 40) -> dict[str, torch.Tensor]:
    x = torch.randn(rows, 128, generator=torch.Generator().manual_seed(3)) * torch.logspace(-5, 3, rows).unsqueeze(1)
    scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-4) / 448
    codes = (x * (1 / scale)).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    return {"value": decode_e4m3(codes) * scale, "codes": codes, "scale": scale}


def test_fp8_rows_takes_codes_that_give_the_value_and_recovers_them_otherwise() -> None:
    stage = _fp8_stage()
    codes, scale = fp8_rows(stage, "index_k")
    assert torch.equal(codes, stage["codes"]) and torch.equal(scale, stage["scale"][:, 0])
    for given in ({"value": stage["value"]}, {**stage, "codes": stage["codes"].roll(1, 0)}):
        codes, scale = fp8_rows(given, "index_k")
        assert torch.equal(decode_e4m3(codes) * scale.unsqueeze(1), stage["value"])


def test_fp8_rows_refuses_a_bf16_row_and_names_it() -> None:
    value = _fp8_stage()["value"].clone()
    value[17] = torch.randn(128, generator=torch.Generator().manual_seed(5)).bfloat16().float()
    with pytest.raises(CannotFeed, match=r"index_k row \(17,\)"):
        fp8_rows({"value": value}, "index_k")


def test_latents_come_back_bit_for_bit_and_others_are_refused() -> None:
    generator = torch.Generator().manual_seed(9)
    codes = torch.randint(0, 127, (50, 448), dtype=torch.uint8, generator=generator)
    codes[0] = 1  # the smallest subnormal throughout
    exponents = torch.randint(100, 140, (50, 7), dtype=torch.uint8, generator=generator)
    rope = torch.randn(50, 64, generator=generator).bfloat16()
    exponents[0] = 118
    value = dequantise(codes, exponents, rope)
    assert torch.equal(dequantise(*latent_parts(value, "window")), value)
    for column, amount in ((5, 1 + 2**-6), (500, 1 + 2**-12)):
        changed = value.clone()
        changed[31, column] = 1.5 * amount
        with pytest.raises(CannotFeed, match=r"kv\.window row 31"):
            latent_parts(changed, "window")


def test_the_kernels_own_folded_weight_is_used_only_for_its_own_query_and_weight() -> None:
    generator = torch.Generator().manual_seed(1)
    scale = torch.rand(4, 64, generator=generator) + 0.1
    folded = torch.randn(4, 64, generator=generator)
    own = {"value": folded / scale, "folded": folded}
    assert torch.equal(folded_weight(own, scale), folded)
    assert torch.equal(folded_weight({**own, "value": 2 * own["value"]}, scale), 2 * own["value"] * scale)
    assert torch.equal(folded_weight(own, 2 * scale), own["value"] * (2 * scale))


@pytest.mark.parametrize(
    ("length", "rows", "width", "branch"),
    [
        (512, 8, 40_000, "trivial"),
        (513, 64, 8192, "register2"),
        (513, 64, 8256, "register4"),
        (16_385, 64, 20_000, "streaming"),
        (40_000, 8, 40_000, "cluster"),
        (40_000, 16, 40_000, "streaming"),
        (70_000, 16, 70_000, "cluster"),
        (70_000, 600, 70_000, "streaming"),
    ],
)
def test_branch_of_topk_v2_on_hopper(length: int, rows: int, width: int, branch: str) -> None:
    assert v2_branch(length, 512, rows, width, major=9) == branch


def test_the_planned_threshold_decides_between_streaming_and_cluster() -> None:
    assert v2_branch(90_000, 512, 100, 200_000, 9, planned=98_304) == "streaming"
    assert v2_branch(99_000, 512, 100, 200_000, 9, planned=98_304) == "cluster"


def test_left_packed_keeps_order_and_counts() -> None:
    packed, count = left_packed(torch.tensor([[-1, 4, -1, 2], [-1, -1, -1, -1], [9, 8, 7, 6]]), align=3)
    assert packed.tolist() == [[4, 2, -1, -1, -1, -1], [-1] * 6, [9, 8, 7, 6, -1, -1]]
    assert count.tolist() == [2, 0, 4] and packed.dtype == count.dtype == torch.int32


def test_caches_are_shuffled_and_disjoint() -> None:
    inputs = generate(Case("caches", "gaussian", (700, 301), rows=6), 3)
    for cache, count in (
        (window_cache(inputs), len(inputs.window_kv)),
        (compressed_cache(inputs), sum(inputs.entries)),
    ):
        assert len(cache.slots.unique()) == count
        assert int(cache.slots.max()) < len(cache.pool) * cache.layout.page_size
        assert cache.view().shape == (len(cache.pool), cache.layout.page_size, 1, 584)
    assert not torch.equal(window_cache(inputs).slots, torch.arange(len(inputs.window_kv)))


def test_packed_entries_add_each_rows_request() -> None:
    inputs = generate(Case("offsets", "gaussian", (700, 301), rows=6), 2)
    selected = torch.full((len(inputs.row_position), 2), -1)
    selected[:, 0] = 1
    packed = packed_entries(inputs, selected)
    assert packed[:, 1].tolist() == [-1] * len(selected)
    assert packed[:, 0].tolist() == [1 + inputs.entry_offset[request] for request in inputs.row_request.tolist()]


@pytest.mark.parametrize("spec", ["sglang-fp8:topk=v3", "sglang-fp8:score=naive", "sglang-fp8:attention=none"])
def test_an_unknown_option_value_names_the_choices(spec: str) -> None:
    with pytest.raises(ValueError, match="choose"):
        get_path(spec)


def test_a_variant_is_named_by_its_options() -> None:
    assert get_path("sglang-fp8").name == "sglang-fp8"
    assert get_path("sglang-fp8:topk=v1,attention=prefill").name == "sglang-fp8:topk=v1,attention=prefill"


def test_availability_says_what_is_missing() -> None:
    available = live_availability()
    assert available.ok or (available.why and (available.install or "sm_" in available.why))


def _trace() -> Trace:
    key, query = _fp8_stage(), _fp8_stage(12)
    codes = torch.randint(0, 127, (5, 448), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    raw = torch.cat((codes, torch.zeros(5, 128, dtype=torch.uint8), torch.full((5, 8), 120, dtype=torch.uint8)), 1)
    window = dequantise(codes, raw[:, 576:583], raw[:, 448:576].contiguous().view(torch.bfloat16))
    compressed = torch.randn(3, 512, generator=torch.Generator().manual_seed(4))  # not what its bytes say
    kv = {"window": window, "window_raw": raw, "compressed": compressed, "compressed_raw": raw[:3].clone()}
    output = torch.randn(2, 64, 512, generator=torch.Generator().manual_seed(6)).bfloat16().float()
    attention = {"value": output, "lse": torch.full((2, 64), -math.inf)}
    return Trace("case", 2, "sglang-fp8", {"index_k": key, "index_q": query, "kv": kv, "attention": attention})


def test_a_compact_recording_expands_bit_for_bit(tmp_path: Path) -> None:
    trace = _trace()
    small = compact(trace)
    assert "value" not in small["index_k"] and "window" not in small["kv"]
    assert "compressed" in small["kv"], "a latent that its bytes do not give must be kept"
    assert small["attention"]["value"].dtype == torch.bfloat16
    small.save(tmp_path / "small.safetensors")
    back = expand(Trace.load(tmp_path / "small.safetensors"))
    for stage, parts in trace.stages.items():
        for name, tensor in parts.items():
            assert back[stage][name].dtype == tensor.dtype
            assert torch.equal(back[stage][name], tensor), f"{stage}.{name}"
    assert next(iter(back["index_k"])) == "value"


def test_an_output_that_bf16_cannot_hold_stays_fp32() -> None:
    trace = _trace()
    trace["attention"]["value"][0, 0, 0] = 1 + 2**-20
    assert compact(trace)["attention"]["value"].dtype == torch.float32


def test_recorded_cases_are_small_and_at_their_edges() -> None:
    ids = [case.id for case in RECORDED_CASES]
    assert len(set(ids)) == len(ids) and all(name.startswith("rec-") for name in ids)
    selecting = [case for case in RECORDED_CASES if max(case.lengths) > 4 * case.config.index_topk]
    assert {case.mode for case in selecting} == {"prefill", "chunked", "decode", "resume"}
    for case in RECORDED_CASES:
        inputs: LayerInputs = generate(replace(case, rows=case.rows), case.layers[-1])
        assert len(inputs.row_position) <= 6 and len(case.layers) <= 2 and case.shuffled_pages


@pytest.mark.parametrize(
    ("stage", "name"), [("compressed", "index_head_dim"), ("score", "index_head_dim"), ("kv", "head_dim")]
)
def test_dims_that_the_operators_are_not_written_for_are_refused_before_anything_is_built(
    stage: StageName, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = generate(Case("dims", "gaussian", (517,), rows=2), 2)
    fewer = replace(inputs, config=replace(inputs.config, **{name: 64}))
    monkeypatch.setattr("difftest.paths.sglang_fp8.build_operators", lambda: pytest.fail("built"))
    with pytest.raises(CannotFeed, match=f"{name} is 64.*written for"):
        get_path("sglang-fp8").stage(stage, fewer, Trace("dims", 2, "sglang-fp8"))
    check_dims(fewer.config, "topk")
    check_dims(inputs.config, stage)
