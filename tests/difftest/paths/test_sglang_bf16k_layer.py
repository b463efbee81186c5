"""SGLang's layer with the bf16 index-K plugin switched on: every stage right, keys those of `bf16-k`. Needs a GPU."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from difftest.cases.case import Case
from difftest.cases.generate import generate
from difftest.cases.recorded_cases import RECORDED_CASES
from difftest.kernels.layout import PAGE_BYTES, PAGE_ENTRIES, move_slots, read_slots
from difftest.kernels.sglang_plugin import pool as plugin_pool
from difftest.kernels.sglang_plugin import steps
from difftest.kernels.sglang_plugin.switch import switched
from difftest.reference.inputs import LayerInputs

from difftest.paths.base import get_path
from difftest.testing import assert_agrees
from difftest.trace import Trace

SPEC = "sglang-bf16k-layer"
AVAILABLE = get_path(SPEC).availability()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not AVAILABLE.ok, reason=f"{AVAILABLE.why} {AVAILABLE.install}")]

CASES = {
    **{case.id: case for case in RECORDED_CASES},
    "mixed-5-2600": Case("mixed-5-2600", "gaussian", (5, 2600, 1, 2311), rows=24, layers=(2,)),
    "gathered-8231": Case("gathered-8231", "gaussian", (8231,), rows=8, layers=(2,)),
    "prefix-16384": Case(
        "prefix-16384", "gaussian", (16601, 16510), mode="decode", pooled_prefix=4000, rows=4, layers=(2,)
    ),
}
DECODE = Case("decode-graph", "gaussian", (2600, 2311), mode="decode", decode_tokens=12, rows=24, layers=(2,))
INDEX = ("compressed", "index_k", "index_q", "head_weight", "score", "topk")


@pytest.fixture(scope="module", params=list(CASES))
def layer(request: pytest.FixtureRequest) -> tuple[LayerInputs, Trace]:
    """Inputs of a case's first layer with an indexer, and its trace with the plugin on."""
    case = CASES[request.param]
    number = next(layer for layer in case.layers if case.config.kind(layer) == "csa")
    inputs = generate(case, number).to("cuda")
    trace = get_path(SPEC).run(inputs, case.id)
    print(f"{case.id} layer {number}: {trace.facts['routes']}")
    return inputs, trace


@pytest.mark.parametrize("name", CASES)
def test_every_stage_agrees_in_isolation(name: str) -> None:
    records = assert_agrees(SPEC, CASES[name], device="cuda")
    assert {record.stage for record in records} >= set(INDEX)


def test_keys_and_queries_are_those_of_bf16_k_bit_for_bit(layer: tuple[LayerInputs, Trace]) -> None:
    inputs, trace = layer
    given = replace(trace, stages={"compressed": trace["compressed"]})
    alone = get_path("bf16-k:store=cuda,rest=sglang-fp8").run(inputs, trace.case, given, upto="head_weight")
    for stage in ("index_k", "index_q", "head_weight"):
        assert torch.equal(trace.value(stage), alone.value(stage)), stage


def assert_same_index(one: Trace, two: Trace) -> None:
    """The same bits at every stage of the index; a selection has no order."""
    for stage in INDEX:
        left, right = (trace.value(stage).nan_to_num() for trace in (one, two))
        if stage == "topk":
            left, right = left.sort().values, right.sort().values
        assert torch.equal(left, right), stage


def test_a_replayed_graph_gives_the_bits_of_eager_steps() -> None:
    inputs = generate(DECODE, 2).to("cuda")
    eager, replayed = (get_path(spec).run(inputs, DECODE.id) for spec in (SPEC, f"{SPEC}:graph=on"))
    assert "graph replay" in replayed.facts["routes"] and "graph replay" not in eager.facts["routes"]
    assert_same_index(eager, replayed)
    assert_agrees(f"{SPEC}:graph=on", DECODE, device="cuda")


def test_switched_off_the_layer_is_sglangs_own() -> None:
    inputs = generate(DECODE, 2).to("cuda")
    before = get_path("sglang-fp8-layer").run(inputs, DECODE.id)
    get_path(SPEC).run(inputs, DECODE.id)
    after = get_path("sglang-fp8-layer").run(inputs, DECODE.id)
    assert_same_index(before, after)


# wiring ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def stood() -> Iterator[object]:
    """A pool as the plugin sizes it, in a process whose hooks are on."""
    from difftest.paths._layer_backend import stand_up
    from difftest.paths.sglang_bf16k_layer import install_hooks

    install_hooks()
    with switched(True):
        yield stand_up(generate(DECODE, 2).to("cuda"), "v2").pool


def test_transfers_move_whole_bf16_pages(stood) -> None:
    _, _, item_bytes = stood.get_contiguous_buf_infos()
    buffers = stood.index_pools[4].contiguous_page_row_buffers()
    assert PAGE_BYTES in item_bytes and all(buffer.shape[1] == PAGE_BYTES for buffer in buffers)
    from sglang.srt.mem_cache.hybrid_cache import hybrid_pool_assembler

    (region,) = hybrid_pool_assembler._dsv4_indexer_regions(stood, 256)
    assert region.item_bytes == PAGE_BYTES and region.page_aligned_only
    assert stood.pd_kv_layout().endswith(plugin_pool.LAYOUT_TAG)


def test_a_page_moved_as_a_row_keeps_its_keys_and_half_a_row_does_not(stood) -> None:
    rows = stood.index_pools[4].index_k_with_scale_buffer[0]
    rows[1] = torch.randint(0, 60, (PAGE_BYTES,), dtype=torch.uint8, device="cuda")
    slots = torch.arange(PAGE_ENTRIES, device="cuda")
    rows[2].copy_(rows[1])
    assert torch.equal(read_slots(rows, PAGE_ENTRIES + slots), read_slots(rows, 2 * PAGE_ENTRIES + slots))
    move_slots(rows, PAGE_ENTRIES + slots, 3 * PAGE_ENTRIES + slots)
    assert torch.equal(rows[3], rows[1])
    rows[2].zero_()
    rows[2, : PAGE_BYTES // 2].copy_(rows[1, : PAGE_BYTES // 2])
    assert not torch.equal(read_slots(rows, PAGE_ENTRIES + slots), read_slots(rows, 2 * PAGE_ENTRIES + slots))


def _fp8_stride(view):
    return view.view(torch.uint8).as_strided((view.shape[0] // 2, PAGE_BYTES), (8448 // 16 * 16, 1))


def test_a_store_skipped_in_decode_is_found_at_the_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = steps.prepare_cuda.store_planned
    monkeypatch.setattr(
        steps.prepare_cuda,
        "store_planned",
        lambda *given, mode, **more: None if mode == "decode" else whole(*given, mode=mode, **more),
    )
    with pytest.raises(AssertionError, match="index_k"):
        assert_agrees(SPEC, DECODE, device="cuda")


def test_a_wrong_page_stride_is_found_at_the_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "page_rows", _fp8_stride)
    with pytest.raises(AssertionError, match="index_k"):
        assert_agrees(SPEC, DECODE, device="cuda")


def test_a_length_fixed_at_capture_is_found_by_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, first = steps.scorer.paged_scores, {}

    def frozen(query, weight, cache, table, lengths, **more):
        if torch.cuda.is_current_stream_capturing():
            return whole(query, weight, cache, table, first[len(lengths)], **more)
        first[len(lengths)] = lengths.clone()
        return whole(query, weight, cache, table, lengths, **more)

    monkeypatch.setattr(steps.scorer, "paged_scores", frozen)
    with pytest.raises(AssertionError, match="score"):
        assert_agrees(f"{SPEC}:graph=on", DECODE, device="cuda")
