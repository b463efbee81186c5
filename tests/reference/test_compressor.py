import math
from collections.abc import Callable
from itertools import combinations, pairwise

import pytest
import torch
from difftest.reference.compressor import Compressor, CompressorState, compressor_inputs, pool, pool_layer
from difftest.reference.inputs import LayerInputs
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

DIM = 6
LIMIT = 5


def tokens(count: int, ratio: int = 4, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, (4 if ratio == 4 else 2) * DIM, generator=generator)


def bias(ratio: int = 4) -> Tensor:
    return torch.randn(2 * ratio if ratio == 4 else ratio, DIM, generator=torch.Generator().manual_seed(99))


def pooled_by_hand(kv_score: Tensor, ape: Tensor, ratio: int) -> list[list[float]]:
    """The definition, one entry, one dim and one slot at a time, with Python floats."""
    entries = []
    for entry in range(len(kv_score) // ratio):
        values = []
        for dim in range(DIM):
            slots = []
            for phase in range(ratio):
                own = kv_score[entry * ratio + phase].tolist()
                if ratio != 4:
                    slots.append((own[dim], own[DIM + dim] + float(ape[phase, dim])))
                    continue
                slots.append((own[DIM + dim], own[3 * DIM + dim] + float(ape[ratio + phase, dim])))
                if entry:
                    before = kv_score[(entry - 1) * ratio + phase].tolist()
                    slots.append((before[dim], before[2 * DIM + dim] + float(ape[phase, dim])))
            top = max(gate for _, gate in slots)
            total = sum(math.exp(gate - top) for _, gate in slots)
            values.append(sum(kv * math.exp(gate - top) for kv, gate in slots) / total)
        entries.append(values)
    return entries


@pytest.mark.parametrize("count", [0, 3, 4, 7, 8, 13, 130, 256])
@pytest.mark.parametrize("ratio", [4, 128])
def test_pool_is_the_definition(ratio: int, count: int) -> None:
    """fp64 against fp64 in another order: at most 256 terms, each product and sum within 2^-53."""
    kv_score, ape = tokens(count, ratio), bias(ratio)
    got = pool(kv_score, ape, ratio)
    assert got.shape == (count // ratio, DIM)
    for row, expected in zip(got.tolist(), pooled_by_hand(kv_score, ape, ratio), strict=True):
        assert row == pytest.approx(expected, abs=256 * 2.0**-52 * float(kv_score.abs().max()))


@pytest.mark.parametrize("ratio", [4, 128])
def test_pool_in_slices_is_the_same(ratio: int) -> None:
    kv_score, ape = tokens(ratio * 9 + 2, ratio), bias(ratio)
    assert torch.equal(pool(kv_score, ape, ratio, max_bytes=1), pool(kv_score, ape, ratio))


def test_first_entry_has_no_previous_block() -> None:
    """Overlap columns of block 0 reach entry 1 and never entry 0; the missing gate is -inf and not 0."""
    kv_score = tokens(8)
    changed = kv_score.clone()
    changed[:4, :DIM] += 100
    changed[:4, 2 * DIM : 3 * DIM] += 1
    before, after = pool(kv_score, bias(), 4), pool(changed, bias(), 4)
    assert torch.equal(before[0], after[0]) and (before[1] != after[1]).all()
    equal_gates = torch.zeros(4, 4 * DIM)
    equal_gates[:, DIM : 2 * DIM] = 1.0
    assert torch.equal(pool(equal_gates, torch.zeros(8, DIM), 4), torch.ones(1, DIM, dtype=torch.float64))


def test_bias_belongs_to_the_position_in_the_block() -> None:
    """A gate bias of 50 on phase 2 leaves the token at phase 2 of the own block (contract K3)."""
    ape = torch.zeros(8, DIM)
    ape[4 + 2] = 50.0
    kv_score = tokens(12)
    own = kv_score[2::4, DIM : 2 * DIM].double()
    assert (pool(kv_score, ape, 4) - own).abs().max() < 8 * math.exp(-50 + 12) * 12


def test_large_gates_stay_finite() -> None:
    kv_score = tokens(8)
    kv_score[:, 2 * DIM :] += 1e30
    assert pool(kv_score, bias(), 4).isfinite().all()


# ---- a layer


@pytest.mark.parametrize("kind", ["csa", "hca"])
def test_layer_packs_separate_requests(make_layer: Callable[..., LayerInputs], kind: str) -> None:
    inputs = make_layer(kind, (6, 7) if kind == "csa" else (300, 260))
    packed = pool_layer(inputs, "main")
    read = compressor_inputs(inputs, "main")
    for request in range(2):
        rows = slice(*inputs.entry_offset[request : request + 2])
        alone = read.kv_score[inputs.token_offset[request] : inputs.token_offset[request + 1]]
        assert torch.equal(packed[rows], pool(alone, read.ape, inputs.ratio))


def test_given_prefix_replaces_pooling(make_layer: Callable[..., LayerInputs]) -> None:
    """Entries past the prefix pool the overlap block before them; the prefix is handed through."""
    inputs = make_layer("csa", (83, 200), mode="decode", pooled_prefix=17)
    read = compressor_inputs(inputs, "index")
    packed = pool_layer(inputs, "index", max_bytes=1)
    assert packed.shape[0] == inputs.entry_offset[-1]
    start = 0
    for request, count in enumerate(inputs.prefix_entries):
        first, stop = inputs.entry_offset[request : request + 2]
        assert count > 0
        assert torch.equal(packed[first : first + count], read.pooled_prefix[start : start + count].double())
        rows = read.kv_score[inputs.token_offset[request] : inputs.token_offset[request + 1]]
        assert torch.equal(packed[first + count : stop], pool(rows, read.ape, 4)[1:])
        start += count


def test_a_layer_without_the_compressor_says_so(make_layer: Callable[..., LayerInputs]) -> None:
    with pytest.raises(ValueError, match="a hca layer has no index compressor"):
        pool_layer(make_layer("hca"), "index")
    with pytest.raises(ValueError, match="a swa layer has no main compressor"):
        pool_layer(make_layer("swa"), "main")


# ---- the stateful compressor


def feed_all(compressor: Compressor, kv_score: Tensor, cuts: list[int]) -> Tensor:
    edges = [0, *cuts, len(kv_score)]
    return torch.cat([compressor.feed(kv_score[a:b]) for a, b in pairwise(edges)])


@pytest.mark.parametrize("count", range(14))
def test_every_split_of_a_short_sequence_equals_the_whole(count: int) -> None:
    """Whole prefill, every chunking with up to three cuts, and token-by-token decode, bit for bit."""
    kv_score, ape = tokens(count), bias()
    whole = pool(kv_score, ape, 4)
    splits = [list(cuts) for size in range(4) for cuts in combinations(range(1, max(1, count)), size)]
    for cuts in [*splits, list(range(1, max(1, count)))]:
        assert torch.equal(feed_all(Compressor(ape, 4, DIM), kv_score, cuts), whole), cuts


@pytest.mark.parametrize("cuts", [[127], [128], [129], [1, 2, 3, 255, 256], list(range(1, 300))], ids=len)
def test_ratio_128_splits_equal_the_whole(cuts: list[int]) -> None:
    kv_score, ape = tokens(300, 128), bias(128)
    assert torch.equal(feed_all(Compressor(ape, 128, DIM), kv_score, cuts), pool(kv_score, ape, 128))


@pytest.mark.parametrize("start", range(4, 12))
@pytest.mark.parametrize("drafts", [1, 5, 7])
def test_rejected_drafts_leave_no_trace(start: int, drafts: int) -> None:
    """Prefill, verify drafts, accept some, roll the rest back, feed the true tokens: as if they had never been."""
    true, wrong, ape = tokens(24), tokens(24, seed=1), bias()
    whole = pool(true, ape, 4)
    for accepted in range(drafts + 1):
        compressor = Compressor(ape, 4, DIM, rollback_limit=7)
        entries = [compressor.feed(true[:start])]
        chunk = torch.cat((true[start : start + accepted], wrong[start + accepted : start + drafts]))
        entries.append(compressor.feed(chunk))
        void = compressor.rollback(drafts - accepted)
        kept = torch.cat(entries)[: sum(map(len, entries)) - void]
        assert len(kept) == compressor.entries == (start + accepted) // 4
        assert torch.equal(torch.cat((kept, compressor.feed(true[start + accepted :]))), whole)


def test_rollback_past_what_is_remembered_is_refused() -> None:
    compressor = Compressor(bias(), 4, DIM, rollback_limit=2)
    compressor.feed(tokens(40))
    with pytest.raises(ValueError, match="cannot roll back 13 of 40 tokens: rows before 32 are forgotten"):
        compressor.rollback(13)
    with pytest.raises(ValueError, match="cannot roll back -1"):
        compressor.rollback(-1)
    assert compressor.tokens == 40


def test_prefix_resume_needs_the_state_and_only_the_state() -> None:
    """Another request hits the prefix of 20 tokens; whatever its compressor held before is never visible."""
    kv_score, ape = tokens(27), bias()
    first = Compressor(ape, 4, DIM)
    first.feed(kv_score[:20])
    snapshot = first.state()
    first.feed(tokens(9, seed=3))
    second = Compressor(ape, 4, DIM)
    second.feed(torch.full((7, 4 * DIM), 1e4))
    second.restore(snapshot)
    assert torch.equal(second.feed(kv_score[20:]), pool(kv_score, ape, 4)[5:])


def test_lost_state_would_be_seen() -> None:
    kv_score, ape = tokens(24), bias()
    fresh = Compressor(ape, 4, DIM)
    fresh.restore(CompressorState(20, torch.zeros(8, 4 * DIM, dtype=torch.float64)))
    assert not torch.equal(fresh.feed(kv_score[20:]), pool(kv_score, ape, 4)[5:])


def test_bias_of_another_width_is_refused() -> None:
    with pytest.raises(ValueError, match=r"ape is \(8, 6\) and dim is 128"):
        Compressor(bias(), 4, 128)


OPERATION = st.one_of(
    st.tuples(st.just("feed"), st.integers(0, 11)),
    st.tuples(st.just("rollback"), st.integers(0, LIMIT)),
    st.tuples(st.just("resume"), st.just(0)),
)


@settings(deadline=None, max_examples=25)
@example(operations=[("feed", 13), ("rollback", 2), ("feed", 0), ("feed", 1)], seed=0)
@given(operations=st.lists(OPERATION, min_size=1, max_size=12), seed=st.integers(0, 2**32))
def test_any_history_equals_the_whole_of_what_remains(operations: list[tuple[str, int]], seed: int) -> None:
    """Feeds, rollbacks (one directly after the other included) and moves to another object, against `pool`."""
    source, ape = tokens(200, seed=seed), bias()
    compressor, kept, entries, used = Compressor(ape, 4, DIM, rollback_limit=LIMIT), source[:0], source[:0, :DIM], 0
    undone = 0
    for operation, count in operations:
        if operation == "feed":
            entries = torch.cat((entries.double(), compressor.feed(source[used : used + count])))
            kept, used = torch.cat((kept, source[used : used + count])), used + count
            undone = max(0, undone - count)
        elif operation == "rollback":
            count = min(count, len(kept), LIMIT - undone)
            entries = entries[: len(entries) - compressor.rollback(count)]
            kept, undone = kept[: len(kept) - count], undone + count
        else:
            state = compressor.state()
            compressor = Compressor(ape, 4, DIM, rollback_limit=LIMIT)
            compressor.restore(state)
        assert torch.equal(entries, pool(kept, ape, 4))
        assert compressor.tokens == len(kept)
