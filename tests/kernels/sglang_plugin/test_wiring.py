"""A request through store, move, transfer and scores of the installed hooks; each wiring fault is found and named.

`Serving` is the smallest server there is: one layer, one request, a prefill, decode steps, a page moved to another, and
the scores of the last row. `verdict` says what is wrong, in the order of the data: the name of the first fault.
"""

import struct
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from difftest.kernels import store
from difftest.kernels.layout import NO_SLOT, PAGE_BYTES, PAGE_ENTRIES, empty_cache, read_slots
from difftest.kernels.naive import gathered_scores
from difftest.kernels.plan import NO_ENTRY
from difftest.kernels.query import prepare_query
from difftest.kernels.rope import rope_table
from difftest.kernels.sglang_plugin import pool as plugin_pool
from difftest.kernels.sglang_plugin import steps
from difftest.kernels.sglang_plugin.pool import page_rows
from difftest.kernels.sglang_plugin.switch import PluginError, switched
from torch import Tensor

LAYER, RATIO, HEADS, DIM, EPS = 2, 4, 4, 128, 1e-6
PREFILL, DECODED = 276, 4
"""Tokens: 69 entries of a prefill and one of decode steps; they lie on pages 5 and 2."""
ENTRIES = (PREFILL + DECODED) // RATIO
TABLE = torch.view_as_complex(rope_table(torch.arange(512)).unflatten(-1, (-1, 2)).contiguous())
SCORE_BOUND = 1e-4
"""Of the largest score: fp32 sums of 4 x 128 products in another order."""


class Plan:
    """A compress plan as SGLang passes it: rows at index 1, packed as `kernels/plan.py` says."""

    compress_ratio = RATIO

    def __init__(self, rows: list[tuple[int, int]], decode: bool) -> None:
        layout = "<Ii8x" if decode else "<IH10x"
        packed = b"".join(struct.pack(layout, length, token) for length, token in rows)
        self.is_decode = decode
        self.rows = torch.frombuffer(bytearray(packed), dtype=torch.uint8).view(len(rows), 16).clone()

    def __getitem__(self, index: int) -> Tensor:
        assert index == 1
        return self.rows


class Serving:
    def __init__(self, sglang: SimpleNamespace) -> None:
        self.sglang = sglang
        self.pool = sglang.pools.DeepSeekV4TokenToKVPool()
        draw = torch.Generator().manual_seed(7)
        self.pooled = torch.randn(ENTRIES, DIM, generator=draw)
        self.norm = 1 + 0.1 * torch.randn(DIM, generator=draw)
        self.query = torch.randn(1, HEADS, DIM, generator=draw).to(torch.bfloat16)
        self.weight = torch.randn(1, HEADS, generator=draw).to(torch.bfloat16)
        self.pages = torch.tensor([5, 2])
        self.position = torch.tensor([PREFILL + DECODED - 1])

    @property
    def slots(self) -> Tensor:
        entry = torch.arange(ENTRIES)
        return self.pages[entry // PAGE_ENTRIES] * PAGE_ENTRIES + entry % PAGE_ENTRIES

    def step(self, plan: Plan, pooled: Tensor, out_loc: Tensor) -> object:
        compressor = self.sglang.modules["sglang.srt.layers.attention.dsv4.compressor_v2"]
        return compressor.compress_norm_rope_store(
            pooled,
            plan,
            norm_weight=self.norm,
            norm_eps=EPS,
            freq_cis=TABLE,
            out_loc=out_loc,
            kvcache=self.pool.get_index_k_with_scale_buffer(LAYER).view(torch.uint8),
            page_size=PAGE_ENTRIES,
        )

    def prefill(self) -> None:
        """Entries in the order a plan may list them, with a row that is none."""
        count = PREFILL // RATIO
        order = torch.randperm(count, generator=torch.Generator().manual_seed(1))
        rows = [((entry + 1) * RATIO, entry * RATIO + RATIO - 1) for entry in order.tolist()]
        out_loc = self.slots[:count].repeat_interleave(RATIO)
        nothing = torch.full((1, DIM), torch.nan)
        self.step(Plan([*rows, (NO_ENTRY, 0xFFFF)], False), torch.cat((self.pooled[order], nothing)), out_loc)

    def decode(self) -> None:
        """A token a step; only every fourth completes an entry, the others have no slot of their own."""
        for length in range(PREFILL + 1, PREFILL + DECODED + 1):
            entry = (length - 1) // RATIO
            slot = self.slots[entry : entry + 1] if length % RATIO == 0 else torch.tensor([0])
            self.step(Plan([(length, 0)], True), self.pooled[entry : entry + 1].clone(), slot)

    def move(self) -> None:
        """The first page goes to page 3 as a transfer moves it: `item_bytes` of the row."""
        rows, item = self.pool.index_pools[4].index_k_with_scale_buffer[0], self.pool.item_bytes()[0]
        rows[3, :item] = rows[5, :item]
        self.pages = torch.tensor([3, 2])

    def expected(self) -> Tensor:
        cache = empty_cache(7)
        store.store(self.pooled, self.norm, EPS, TABLE, torch.arange(ENTRIES) * RATIO, self.slots, cache)
        return read_slots(cache, self.slots)

    def stored(self) -> Tensor:
        return read_slots(self.pool.index_pools[4].index_k_with_scale_buffer[0], self.slots)

    def scores(self) -> Tensor:
        indexer = self.sglang.indexer.C4Indexer(LAYER, self.query, TABLE)
        query, weight = indexer.compute_q(None, self.position, self.weight)
        return self.sglang.modules["deep_gemm"].fp8_paged_mqa_logits(
            query.unsqueeze(1),
            self.pool.get_index_k_with_scale_buffer(LAYER).view(7, PAGE_ENTRIES, 1, 132),
            weight.squeeze(2),
            torch.tensor([[ENTRIES]], dtype=torch.int32),
            self.pages.to(torch.int32).unsqueeze(0),
            None,
            2 * PAGE_ENTRIES,
            False,
        )

    def expected_scores(self) -> Tensor:
        cache = empty_cache(7, fill=0)
        store.store(self.pooled, self.norm, EPS, TABLE, torch.arange(ENTRIES) * RATIO, self.slots, cache)
        query, weight = prepare_query(self.query, self.weight, TABLE, self.position)
        lengths, table = torch.tensor([ENTRIES]), self.pages.unsqueeze(0)
        return gathered_scores(query, weight, cache, table, lengths, width=2 * PAGE_ENTRIES)


def verdict(sglang: SimpleNamespace) -> str:
    """ "right", or the first thing that is wrong."""
    try:
        serving = Serving(sglang)
    except SystemExit as refused:
        return f"refused: {refused}"
    if serving.pool.item_bytes() != [PAGE_BYTES, PAGE_BYTES]:
        return f"a transfer moves {serving.pool.item_bytes()[0]} bytes of a page of {PAGE_BYTES}"
    try:
        serving.prefill()
        serving.decode()
        expected, prefilled = serving.expected(), PREFILL // RATIO
        for name, part in (("prefill", slice(0, prefilled)), ("decode", slice(prefilled, None))):
            if not torch.equal(serving.stored()[part].view(torch.int16), expected[part].view(torch.int16)):
                return f"keys of the {name} are wrong"
        serving.move()
        if not torch.equal(serving.stored().view(torch.int16), expected.view(torch.int16)):
            return "keys of a moved page are stale"
        got, want = serving.scores()[:, :ENTRIES], serving.expected_scores()[:, :ENTRIES]
    except PluginError as error:
        return f"refused: {error}"
    if not bool((got - want).abs().max() <= SCORE_BOUND * want.abs().max()):
        return "scores are wrong"
    return "right"


def test_a_request_is_served_rightly(on) -> None:
    assert verdict(on) == "right"


def test_rows_that_are_no_entry_write_nothing(on) -> None:
    serving = Serving(on)
    serving.prefill()
    rows = serving.pool.index_pools[4].index_k_with_scale_buffer
    untouched = [0, 1, 3, 4, 6]
    assert bool((rows[0][untouched] == 255).all()) and bool((rows[1] == 255).all())
    assert bool((rows[0][2, (PREFILL // RATIO - PAGE_ENTRIES) * 256 :] == 255).all())


def test_switched_off_sglang_serves(on) -> None:
    serving = Serving(on)
    with switched(False):
        assert serving.step(Plan([(4, 0)], True), serving.pooled[:1], torch.tensor([0])) == "fp8 store"
        assert on.indexer.C4IndexerBackendMixin._gather_nonpaged_index_k(
            c4_indexer=None, token_to_kv_pool=None, plan=None
        )


def test_wider_rows_are_sglangs(on) -> None:
    compressor = on.modules["sglang.srt.layers.attention.dsv4.compressor_v2"]
    latents = torch.zeros(1, 512)
    options = {"norm_weight": None, "norm_eps": EPS, "freq_cis": None, "out_loc": None, "page_size": 64}
    assert compressor.compress_norm_rope_store(latents, None, kvcache=latents, **options) == "fp8 store"


# faults ---------------------------------------------------------------------------------------------------------------

Fault = Callable[[pytest.MonkeyPatch, SimpleNamespace], None]


def wrong_page_stride(patch: pytest.MonkeyPatch, sglang: SimpleNamespace) -> None:
    """Store and scorer take pages for 8,448 bytes apart: in agreement with each other, and wrong for the pool."""

    def rows(view: Tensor) -> Tensor:
        return view.view(torch.uint8).as_strided((3, PAGE_BYTES), (8448, 1))

    patch.setattr(steps, "page_rows", rows)


def wrong_bytes_per_token(patch: pytest.MonkeyPatch, sglang: SimpleNamespace) -> None:
    patch.setattr(sglang.pools, "get_dsv4_indexer_bytes_per_token", lambda *_: 132)


def wrong_bytes_unchecked(patch: pytest.MonkeyPatch, sglang: SimpleNamespace) -> None:
    """The same, past the check of the built pool."""
    wrong_bytes_per_token(patch, sglang)
    patch.setattr(plugin_pool, "check_pool", lambda pool: None)


def store_skips(mode: str) -> Fault:
    def plant(patch: pytest.MonkeyPatch, sglang: SimpleNamespace) -> None:
        rows = f"{mode}_rows"
        whole = getattr(steps.plans, rows)

        def skip(*given: object) -> tuple[Tensor, Tensor]:
            positions, slots = whole(*given)
            return positions, torch.full_like(slots, NO_SLOT)

        patch.setattr(steps.plans, rows, skip)

    return plant


def stale_page_after_a_move(patch: pytest.MonkeyPatch, sglang: SimpleNamespace) -> None:
    """A page is moved by a copy of its old bytes: the table changes, the keys stay behind."""

    def move(serving: Serving) -> None:
        serving.pages = torch.tensor([3, 2])

    patch.setattr(Serving, "move", move)


def transfer_of_fp8_bytes(patch: pytest.MonkeyPatch, sglang: SimpleNamespace) -> None:
    patch.setattr(sglang.pools.DeepSeekV4TokenToKVPool, "item_bytes", lambda self: [8448, 8448])


def half_a_page_moved(patch: pytest.MonkeyPatch, sglang: SimpleNamespace) -> None:
    def move(serving: Serving) -> None:
        rows = serving.pool.index_pools[4].index_k_with_scale_buffer[0]
        rows[3, :8448] = rows[5, :8448]
        serving.pages = torch.tensor([3, 2])

    patch.setattr(Serving, "move", move)


def fp8_query(patch: pytest.MonkeyPatch, sglang: SimpleNamespace) -> None:
    """SGLang's own query reaches the scores."""
    own = torch.zeros(1, HEADS, DIM, dtype=torch.float8_e4m3fn), torch.zeros(1, HEADS, 1)
    patch.setattr(sglang.indexer.C4Indexer, "compute_q", lambda *_: own)


def a_scale_left_in_the_weight(patch: pytest.MonkeyPatch, sglang: SimpleNamespace) -> None:
    whole = steps.triton_query.prepare_query

    def folded(*given: object) -> tuple[Tensor, Tensor]:
        query, weight = whole(*given)
        return query, weight / 448

    patch.setattr(steps.triton_query, "prepare_query", folded)


FAULTS: dict[str, tuple[Fault, str]] = {
    "wrong page stride": (wrong_page_stride, "keys of the prefill are wrong"),
    "wrong bytes per token": (wrong_bytes_per_token, "refused: .* 8448 bytes and bf16 ones take 16384"),
    "wrong bytes, unchecked": (wrong_bytes_unchecked, "a transfer moves 8448 bytes of a page of 16384"),
    "store skipped in prefill": (store_skips("prefill"), "keys of the prefill are wrong"),
    "store skipped in decode": (store_skips("decode"), "keys of the decode are wrong"),
    "stale page after a move": (stale_page_after_a_move, "keys of a moved page are stale"),
    "transfer of fp8 bytes": (transfer_of_fp8_bytes, "a transfer moves 8448 bytes of a page of 16384"),
    "half a page moved": (half_a_page_moved, "keys of a moved page are stale"),
    "fp8 query": (fp8_query, "refused: .*the index scores of layer 2 failed: the query is torch.float8_e4m3fn"),
    "a scale left in the weight": (a_scale_left_in_the_weight, "scores are wrong"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_wiring_fault_is_found_and_named(name: str, on, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, says = FAULTS[name]
    plant(monkeypatch, on)
    with pytest.raises(AssertionError, match=says):
        found = verdict(on)
        assert found == "right", found


def test_scores_take_lengths_where_the_step_keeps_them(on, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph replays with the lengths that lie at the captured address: a copy, or a number, would be frozen."""
    seen = {}
    monkeypatch.setattr(
        steps.scorer, "paged_scores", lambda q, w, cache, table, lengths, **more: seen.update(more, lengths=lengths)
    )
    serving, lengths = Serving(on), torch.tensor([[5], [7]], dtype=torch.int32)
    steps.paged_scores(
        lambda *_: None,
        torch.zeros(2, 1, HEADS, DIM, dtype=torch.bfloat16),
        serving.pool.get_index_k_with_scale_buffer(LAYER),
        torch.zeros(2, HEADS),
        lengths,
        torch.zeros(2, 2, dtype=torch.int32),
        None,
        128,
    )
    assert seen["lengths"].data_ptr() == lengths.data_ptr() and seen["width"] == 128 and seen["fill"] is None


@pytest.mark.parametrize("next_n", [1, 2])
def test_rows_of_one_request_share_its_table(on, next_n: int) -> None:
    serving = Serving(on)
    serving.prefill()
    count = PREFILL // RATIO
    query = torch.randn(1, next_n, HEADS, DIM, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    lengths = torch.tensor([[count - 1, count][-next_n:]], dtype=torch.int32)
    weight, table = torch.ones(next_n, HEADS), serving.pages.to(torch.int32).unsqueeze(0)
    view = serving.pool.get_index_k_with_scale_buffer(LAYER)
    score = on.modules["deep_gemm"].fp8_paged_mqa_logits(query, view, weight, lengths, table, None, 128)
    rows = page_rows(view)
    want = gathered_scores(query[0], weight, rows, table.long(), lengths[0], torch.zeros(next_n, dtype=torch.int64))
    for row in range(next_n):
        seen = int(lengths[0, row])
        assert torch.allclose(score[row, :seen], want[row, :seen], rtol=1e-4, atol=1e-3)


def test_gathered_keys_score_as_paged_ones(on) -> None:
    serving = Serving(on)
    serving.prefill()
    mixin = on.indexer.C4IndexerBackendMixin
    count = PREFILL // RATIO
    plan = SimpleNamespace(
        page_table=serving.pages.to(torch.int32).unsqueeze(0),
        max_seqlen_k=2 * PAGE_ENTRIES,
        ke=torch.tensor([0, 7, count], dtype=torch.int32),
    )
    keys = mixin._gather_nonpaged_index_k(
        c4_indexer=SimpleNamespace(layer_id=LAYER), token_to_kv_pool=serving.pool, plan=plan
    )
    assert torch.equal(keys.keys[:count].view(torch.int16), serving.stored()[:count].view(torch.int16))
    query = torch.randn(3, HEADS, DIM, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    weight, rows = torch.ones(3, HEADS), slice(1, 3)
    score = mixin._nonpaged_mqa_logits(q_indexer=query, weights=weight, kv=keys, plan=plan, rows=rows)
    table, lengths = plan.page_table.long(), plan.ke[rows]
    cache = page_rows(serving.pool.get_index_k_with_scale_buffer(LAYER))
    want = gathered_scores(
        query[rows], weight[rows], cache, table, lengths, torch.zeros(2, dtype=torch.int64), width=128
    )
    for row, seen in enumerate(lengths.tolist()):
        assert torch.allclose(score[row, :seen], want[row, :seen], rtol=1e-4, atol=1e-3)
