import math
from dataclasses import replace

import pytest
import torch
from difftest.reference import oracle
from difftest.reference.inputs import LayerInputs, Span
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from difftest.paths import _sglang_attention, sglang_fp8_model
from difftest.paths._sglang_compressor import StateRing
from difftest.paths.oracle import Oracle
from difftest.paths.planar_pages import POISON
from difftest.paths.sglang_fp8_model import SglangFp8Model
from difftest.trace import Trace

CODES_EQUAL = 0.9999
"""Share of codes that fp32 preparation leaves as exact preparation makes them."""


_TRACES: dict[int, tuple[LayerInputs, Trace]] = {}


def upstream(inputs: LayerInputs) -> Trace:
    """The model's trace of `inputs`, made once."""
    if id(inputs) not in _TRACES:
        _TRACES[id(inputs)] = inputs, SglangFp8Model().run(inputs, "case")
    return _TRACES[id(inputs)][1]


def code_distance(codes: Tensor, exact: Tensor) -> Tensor:
    """Steps between e4m3 codes uint8 and the codes of exact values fp64 (already divided by their scale)."""
    want = exact.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)

    def order(code: Tensor) -> Tensor:
        return torch.where(code >= 128, 128 - code.int(), code.int())

    return (order(codes) - order(want)).abs()


def resteps(inputs: LayerInputs, cuts: list[int]) -> LayerInputs:
    """The same tokens in other steps: every request cut at the same positions."""
    edges = sorted({cut for cut in cuts if cut > 0})
    steps = []
    for start, stop in zip([0, *edges], [*edges, max(inputs.lengths)], strict=True):
        spans = (Span(request, start, min(stop, length)) for request, length in enumerate(inputs.lengths))
        steps.append(tuple(span for span in spans if span.start < span.stop))
    return replace(inputs, steps=tuple(steps))


def test_pooling_is_exact_to_fp32(csa: LayerInputs) -> None:
    got, want = upstream(csa).value("compressed"), oracle.compressed(csa)
    assert (got - want).abs().max() < 2e-6
    assert ((got - want).norm() / want.norm()) < 2e-7


def test_key_codes_and_scales_are_those_of_exact_preparation(csa: LayerInputs) -> None:
    trace = upstream(csa)
    key = oracle.index_k(csa, trace.value("compressed").double())
    scale = key.abs().amax(-1, keepdim=True).clamp_min(1e-4) / 448
    assert ((trace["index_k"]["scale"] - scale).abs() / scale).max() < 1e-6
    distance = code_distance(trace["index_k"]["codes"], key / scale)
    assert distance.max() <= 1 and (distance == 0).double().mean() >= CODES_EQUAL


def test_query_codes_and_scales_are_those_of_exact_preparation(csa: LayerInputs) -> None:
    stored = upstream(csa)["index_q"]
    query = oracle.index_q(csa)
    scale = query.abs().amax(-1, keepdim=True).clamp_min(1e-4) / 448
    assert ((stored["scale"] - scale).abs() / scale).max() < 1e-6
    distance = code_distance(stored["codes"], query / scale)
    assert distance.max() <= 1 and (distance == 0).double().mean() >= CODES_EQUAL


def test_scores_are_fp32_sums_of_the_stored_codes(csa: LayerInputs) -> None:
    trace = upstream(csa)
    keys, queries = trace["index_k"], trace["index_q"]
    key = keys["codes"].view(torch.float8_e4m3fn).double() * keys["scale"]
    query = queries["codes"].view(torch.float8_e4m3fn).double() * queries["scale"]
    weight, seen = trace.value("head_weight").double(), csa.visible
    for row, (request, count) in enumerate(zip(csa.row_request.tolist(), seen.tolist(), strict=True)):
        entries = slice(csa.entry_offset[request], csa.entry_offset[request] + count)
        terms = (query[row] @ key[entries].T).relu() * weight[row].unsqueeze(1)
        got = trace.value("score")[row]
        assert bool((got[count:] == -math.inf).all())
        assert ((got[:count] - terms.sum(0)).abs() <= 1e-5 * terms.abs().sum(0)).all()


@settings(deadline=None, max_examples=6)
@given(cuts=st.lists(st.integers(1, 700), max_size=6))
def test_steps_do_not_change_an_entry(csa: LayerInputs, cuts: list[int]) -> None:
    model = SglangFp8Model()
    whole, cut = resteps(csa, []), resteps(csa, cuts)
    assert csa.index is not None
    assert torch.equal(model.pool_layer(whole, csa.index), model.pool_layer(cut, csa.index))


def test_single_token_steps_give_the_entries_of_one_prefill(csa: LayerInputs) -> None:
    model = SglangFp8Model()
    assert csa.index is not None
    whole = model.pool_layer(resteps(csa, []), csa.index)
    assert torch.equal(whole, model.pool_layer(resteps(csa, list(range(1, 420))), csa.index))


def test_every_stage_is_the_same_in_one_step(ragged: LayerInputs) -> None:
    chunked, whole = upstream(ragged), upstream(resteps(ragged, []))
    for stage in chunked.stages:
        for name, tensor in chunked[stage].items():
            assert torch.equal(tensor, whole[stage][name]), (stage, name)


def test_a_given_prefix_continues_as_its_tokens_would(csa: LayerInputs) -> None:
    assert csa.index is not None
    model = SglangFp8Model()
    whole = model.pool_layer(csa, csa.index)
    prefix = (100, 0, 0, 7)
    kept = [slice(start, stop) for start, stop in zip(csa.entry_offset, csa.entry_offset[1:], strict=False)]
    tokens = [max(0, 4 * count - 4) for count in prefix]
    rows = [
        csa.index.kv_score[start + first : stop]
        for start, stop, first in zip(csa.token_offset, csa.token_offset[1:], tokens, strict=False)
    ]
    given_part = replace(
        csa.index,
        kv_score=torch.cat(rows),
        pooled_prefix=torch.cat([whole[part][:count] for part, count in zip(kept, prefix, strict=True)]),
    )
    spans = [Span(request, 4 * count, length) for request, (count, length) in enumerate(zip(prefix, csa.lengths))]  # noqa: B905
    resumed = replace(csa, prefix_entries=prefix, index=given_part, steps=(tuple(spans),))
    assert torch.equal(model.pool_layer(resumed, given_part), whole)


def test_a_permutation_of_pages_changes_bytes_and_nothing_else(csa: LayerInputs) -> None:
    order = torch.randperm(csa.num_pages, generator=torch.Generator().manual_seed(5))
    moved = replace(csa, page_table=torch.where(csa.page_table < 0, -1, order[csa.page_table.clamp_min(0)]))
    first, second = upstream(csa), upstream(moved)
    assert not torch.equal(first["index_k"]["raw"], second["index_k"]["raw"])
    for stage in first.stages:
        for name in set(first[stage]) - {"raw"}:
            assert torch.equal(first[stage][name], second[stage][name]), (stage, name)


def test_pages_hold_codes_then_scales_and_poison_elsewhere(csa: LayerInputs) -> None:
    stored = upstream(csa)["index_k"]
    raw, entry = stored["raw"].clone(), 70
    slot = int(csa.entry_slot[entry])
    page, offset = raw[slot // 64], slot % 64
    assert torch.equal(page[offset * 128 : offset * 128 + 128], stored["codes"][entry])
    scale = page[64 * 128 + 4 * offset : 64 * 128 + 4 * offset + 4].view(torch.float32)
    assert torch.equal(scale, stored["scale"][entry])
    for slot in csa.entry_slot.tolist():
        raw[slot // 64, slot % 64 * 128 : slot % 64 * 128 + 128] = POISON
        raw[slot // 64, 8192 + slot % 64 * 4 : 8192 + slot % 64 * 4 + 4] = POISON
    assert bool((raw == POISON).all())


def test_a_slot_that_was_never_written_reads_as_nan(csa: LayerInputs) -> None:
    class Forgets(SglangFp8Model):
        def pack_page(self, layout, pool, slots, codes, scale):  # type: ignore[no-untyped-def]
            super().pack_page(layout, pool, slots[1:], codes[1:], scale[1:])

    trace = Forgets().run(csa, "case", upto="index_k")
    assert trace.value("index_k").isnan().any()


def test_a_ring_row_that_was_never_written_is_nan() -> None:
    ring = StateRing(4, 2, torch.device("cpu"))
    ring.write(0, torch.ones(6, 2))
    assert bool(ring.read(0, 6).isfinite().all()) and bool(ring.read(6, 8).isnan().all())
    ring.write(6, torch.full((7, 2), 2.0))
    assert ring.read(8, 13).eq(2).all(), "positions from the block before the incomplete one on"


def test_selection_up_to_k_never_reads_the_scores() -> None:
    model = SglangFp8Model()
    assert model.select(torch.full((5,), math.nan), 8).tolist() == [0, 1, 2, 3, 4]
    assert model.select(torch.empty(0), 8).tolist() == []


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10_000), size=st.integers(9, 200), levels=st.integers(1, 20))
def test_selection_is_exact_and_prefers_lower_entries(seed: int, size: int, levels: int) -> None:
    score = torch.randint(-levels, levels, (size,), generator=torch.Generator().manual_seed(seed)).float()
    want = sorted(range(size), key=lambda entry: (-score[entry].item(), entry))[:8]
    assert SglangFp8Model().select(score, 8).tolist() == sorted(want)


def test_selection_leaves_nan_out() -> None:
    score = torch.tensor([math.nan, 1.0, math.nan, -2.0, 0.5, -math.inf])
    assert SglangFp8Model().select(score, 3).tolist() == [1, 3, 4]


def test_blocks_of_any_size_give_the_same_scores(csa: LayerInputs, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = upstream(csa)
    monkeypatch.setattr(sglang_fp8_model, "SCORE_BYTES", 1)
    monkeypatch.setattr(sglang_fp8_model, "KEY_BLOCK", 13)
    monkeypatch.setattr(_sglang_attention, "LATENT_BLOCK", 13)
    monkeypatch.setattr(_sglang_attention, "ATTENTION_BYTES", 1)
    blocked = SglangFp8Model().run(csa, "case")
    assert torch.equal(whole["index_k"]["raw"], blocked["index_k"]["raw"])
    assert torch.equal(whole["kv"]["compressed_raw"], blocked["kv"]["compressed_raw"])
    score, again = whole.value("score"), blocked.value("score")
    seen = score.isfinite()
    assert torch.equal(seen, again.isfinite())
    assert torch.allclose(score[seen], again[seen], rtol=1e-4, atol=1e-6)
    assert torch.allclose(whole.value("attention"), blocked.value("attention"), rtol=2**-7, atol=1e-5)


def test_latents_are_rounded_where_the_kernels_round_them(ragged: LayerInputs) -> None:
    got, exact = upstream(ragged)["kv"], Oracle().run(ragged, "case")["kv"]
    for name in ("window", "compressed"):
        if not len(got[name]):
            continue
        nope, rope = exact[name][:, :448].double(), exact[name][:, 448:]
        source = nope if name == "window" else nope.to(torch.bfloat16).double()
        blocks = source.view(-1, 7, 64)
        scale = torch.exp2((blocks.abs().amax(-1, keepdim=True).clamp_min(1e-4) / 448).log2().ceil())
        codes = got[f"{name}_raw"][:, :448].reshape(-1, 7, 64)
        distance = code_distance(codes, blocks / scale)
        assert distance.max() <= 1 and (distance == 0).double().mean() >= CODES_EQUAL, name
        same = got[name][:, 448:] == rope.to(torch.bfloat16).float()
        assert same.double().mean() >= 0.999, name


def test_window_is_quantised_from_fp32_and_compressed_from_bf16() -> None:
    model, between = SglangFp8Model(), torch.tensor([1 + 2**-9])
    assert model.window_source(between).item() != model.compressed_source(between).item() == 1.0


def test_attention_follows_the_exact_one_on_its_own_latents(ragged: LayerInputs) -> None:
    trace = upstream(ragged)
    exact = Oracle().run(
        ragged, "case", given=replace(trace, stages={k: v for k, v in trace.stages.items() if k != "attention"})
    )
    got, want = trace["attention"], exact["attention"]
    assert ((got["value"] - want["value"]).norm() / want["value"].norm()) < 8e-3
    assert (got["lse"] - want["lse"]).abs().max() < 2e-2
    assert torch.equal(got["value"].to(torch.bfloat16).float(), got["value"])


def test_a_row_without_a_valid_key_is_zero_and_slot_zero_does_not_leak() -> None:
    model = SglangFp8Model()
    latents = torch.full((3, 8), math.nan)
    latents[2] = 1.0
    keys = model.gather(latents, torch.tensor([[-1, -1], [2, -1]]))
    valid = torch.tensor([[False, False], [True, False]])
    out, lse = model.attend(torch.ones(2, 4, 8), keys, valid, torch.zeros(4), 8**-0.5)
    assert bool((out[0] == 0).all()) and bool((lse[0] == -math.inf).all())
    want = 1 / (1 + math.exp(-(8**0.5)))
    assert out[1].flatten().tolist() == pytest.approx([want] * 32, rel=2**-8)
    assert lse[1].tolist() == pytest.approx([8**0.5] * 4, rel=1e-6)


def test_the_sink_joins_the_row_sum_and_not_the_log_sum_exp() -> None:
    model, valid = SglangFp8Model(), torch.tensor([[True, True]])
    keys, query = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]]), torch.tensor([[[1.0, 1.0]]])
    calm = model.attend(query, keys, valid, torch.tensor([-100.0]), 1.0)
    sunk = model.attend(query, keys, valid, torch.tensor([1.0 + math.log(2.0)]), 1.0)
    assert calm[0].flatten().tolist() == [0.5, 0.5] and sunk[0].flatten().tolist() == [0.25, 0.25]
    assert calm[1].item() == sunk[1].item() == pytest.approx(1 + math.log(2))


def test_stages_of_another_path_are_scored_at_their_value(csa: LayerInputs) -> None:
    exact = Oracle().run(csa, "case")
    mixed = SglangFp8Model().run(
        csa, "case", given=Trace("case", 2, "mixed", {k: exact.stages[k] for k in ("index_k", "index_q")})
    )
    seen = mixed.value("score").isfinite()
    assert torch.allclose(mixed.value("score")[seen], exact.value("score").float()[seen], rtol=1e-4, atol=1e-6)
