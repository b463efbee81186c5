"""The CUDA twins: the reference's values within their rounding, by plain rows and by SGLang's plans."""

import struct
from collections.abc import Callable

import pytest
import torch
from difftest.kernels import prepare_cuda, query, store
from difftest.kernels.cuda import find_nvcc
from difftest.kernels.layout import NO_SLOT, PAGE_BYTES, PAGE_ENTRIES, POISON_BYTE, empty_cache, read_slots
from difftest.kernels.rope import rope_table
from difftest.reference.config import load_config
from difftest.reference.indexer import index_key, index_query
from difftest.reference.norm import rms_norm
from difftest.reference.rope import rope_table as published
from torch import Tensor

EPS = 1e-6
FP32_UNIT = 2.0**-24
KEY_UNITS = 2 * 80
QUERY_UNITS = 2 * 12
"""Radii of `test_store.py` and `test_query.py`: the arithmetic is the same, in another order of sums."""

FLASH = load_config("v4-flash")


@pytest.fixture
def gpu() -> str:
    if not torch.cuda.is_available() or find_nvcc() is None:
        pytest.skip("no CUDA device or no nvcc here: the CUDA kernels are not run")
    return "cuda"


def drawn(entries: int) -> tuple[Tensor, Tensor]:
    pooled = torch.randn(entries, 128) * torch.exp2(torch.randint(-12, 12, (entries, 1)).float())
    return pooled, 1 + 0.1 * torch.randn(128)


def exact(pooled: Tensor, weight: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    keys = index_key(pooled, weight, EPS, published(FLASH, "csa", positions))
    return keys, KEY_UNITS * FP32_UNIT * rms_norm(pooled, weight, EPS).abs().sum(-1, keepdim=True) * 128**-0.5


@pytest.mark.gpu
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("entries", [1, 5, 333])
def test_rows_equal_the_reference(
    gpu: str, entries: int, index: torch.dtype, assert_rounds: Callable[..., None]
) -> None:
    pooled, weight = drawn(entries)
    positions = 4 * torch.randperm(1000)[:entries] + 4
    slots = torch.randperm(8 * PAGE_ENTRIES)[:entries]
    cache = empty_cache(8, gpu, PAGE_BYTES + 48, POISON_BYTE)
    table = rope_table(torch.arange(4008)).to(gpu)
    moved = (positions.to(gpu, index), slots.to(gpu, index))
    prepare_cuda.store(pooled.to(gpu), weight.to(gpu), EPS, table, *moved, cache)
    assert_rounds(read_slots(cache, slots.to(gpu)), *exact(pooled, weight, positions))
    twin = empty_cache(8, gpu, PAGE_BYTES + 48, POISON_BYTE)
    store.store(pooled.to(gpu), weight.to(gpu), EPS, table, *moved, twin)
    assert (cache == twin).float().mean() > 0.9999


@pytest.mark.gpu
def test_negative_slots_and_padding_rows_are_skipped(gpu: str) -> None:
    pooled, weight = drawn(5)
    pooled[1] = torch.nan
    cache = empty_cache(2, gpu, fill=0xA5)
    slots = torch.tensor([3, NO_SLOT, 7, -5, 0], device=gpu)
    positions = torch.tensor([4, 1 << 40, 8, -7, 12], device=gpu)
    table = rope_table(torch.arange(16)).to(gpu)
    prepare_cuda.store(pooled.to(gpu), weight.to(gpu), EPS, table, positions, slots, cache)
    changed = (cache.view(2 * PAGE_ENTRIES, -1) != 0xA5).any(1).nonzero()[:, 0]
    assert changed.tolist() == [0, 3, 7]
    assert read_slots(cache, slots[slots >= 0]).isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("page", [131_071, 131_072, 262_144])
def test_page_offsets_are_64_bit(gpu: str, page: int, assert_rounds: Callable[..., None]) -> None:
    pooled, weight = drawn(2)
    cache = empty_cache(262_145, gpu)
    slots, positions = torch.tensor([page * PAGE_ENTRIES, page * PAGE_ENTRIES + 63]), torch.tensor([4, 8])
    table = rope_table(torch.arange(16)).to(gpu)
    prepare_cuda.store(pooled.to(gpu), weight.to(gpu), EPS, table, positions.to(gpu), slots.to(gpu), cache)
    assert_rounds(read_slots(cache, slots.to(gpu)), *exact(pooled, weight, positions))


@pytest.mark.gpu
def test_prefill_plan(gpu: str) -> None:
    """Plan rows in any order, two of them no entry; out_loc goes by query token."""
    pooled, weight = drawn(5)
    lengths, tokens = [12, None, 4, 8, None], [11, None, 3, 7, None]
    packed = b"".join(
        struct.pack("<IHHii", 0xFFFFFFFF, 0, 0, -1, -1)
        if length is None
        else struct.pack("<IHHii", length, token, 1, 2, 3)
        for length, token in zip(lengths, tokens, strict=True)
    )
    plan = torch.frombuffer(bytearray(packed), dtype=torch.uint8).view(-1, 16).to(gpu)
    out_loc = (torch.arange(13) * 5 % 64).to(gpu)
    table = rope_table(torch.arange(16)).to(gpu)
    cache, want = (empty_cache(2, gpu, fill=POISON_BYTE) for _ in range(2))
    arguments = (weight.to(gpu), EPS, table)
    prepare_cuda.store_planned(pooled.to(gpu), plan, *arguments, out_loc, cache, mode="prefill")
    rows = torch.tensor([0, 2, 3])
    positions, slots = torch.tensor([8, 0, 4], device=gpu), out_loc[torch.tensor([11, 3, 7], device=gpu)]
    prepare_cuda.store(pooled[rows].to(gpu), *arguments, positions, slots, want)
    assert torch.equal(cache, want)


@pytest.mark.gpu
def test_decode_plan(gpu: str) -> None:
    pooled, weight = drawn(4)
    packed = b"".join(struct.pack("<Iiii", length, 1, 2, 3) for length in (3, 4, 9, 12))
    plan = torch.frombuffer(bytearray(packed), dtype=torch.uint8).view(-1, 16).to(gpu)
    out_loc = torch.tensor([1, 2, 3, 70], device=gpu)
    table = rope_table(torch.arange(16)).to(gpu)
    cache, want = (empty_cache(2, gpu, fill=POISON_BYTE) for _ in range(2))
    arguments = (weight.to(gpu), EPS, table)
    prepare_cuda.store_planned(pooled.to(gpu), plan, *arguments, out_loc, cache, mode="decode")
    rows = torch.tensor([1, 3])
    positions = torch.tensor([0, 8], device=gpu)
    prepare_cuda.store(pooled[rows].to(gpu), *arguments, positions, out_loc[rows.to(gpu)], want)
    assert torch.equal(cache, want)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "heads"), [(1, 64), (7, 64), (5, 3)])
def test_queries_equal_the_reference(gpu: str, rows: int, heads: int, assert_rounds: Callable[..., None]) -> None:
    q = (torch.randn(rows, heads, 128) * torch.exp2(torch.randint(-9, 9, (rows, heads, 1)).float())).bfloat16()
    positions, table = torch.randint(1, 4096, (rows,)), rope_table(torch.arange(4096)).to(gpu)
    weight = torch.randn(rows, heads).bfloat16()
    got, scaled = prepare_cuda.prepare_query(q.to(gpu), weight.to(gpu), table, positions.to(gpu))
    rad = QUERY_UNITS * FP32_UNIT * q.double().abs().sum(-1, keepdim=True) * 128**-0.5
    assert_rounds(got, index_query(q, published(FLASH, "csa", positions)), rad)
    assert scaled is not None and torch.equal(scaled.cpu(), query.head_weight(weight))
    narrow = prepare_cuda.index_query(q.to(gpu), table, positions.to(gpu, torch.int32))
    assert torch.equal(narrow, got)


@pytest.mark.gpu
def test_a_captured_step_replays(gpu: str) -> None:
    """Store, query and weights in a CUDA graph equal the eager launches."""
    pooled, weight = (tensor.to(gpu) for tensor in drawn(70))
    table, positions = rope_table(torch.arange(400)).to(gpu), 4 * torch.arange(70, device=gpu)
    caches = [empty_cache(2, gpu, fill=POISON_BYTE) for _ in range(2)]
    prepare_cuda.store(pooled, weight, EPS, table, positions, positions // 4, caches[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prepare_cuda.store(pooled, weight, EPS, table, positions, positions // 4, caches[1])
    caches[1].fill_(POISON_BYTE)
    graph.replay()
    assert torch.equal(*caches)


def test_refused_on_the_cpu_and_with_wrong_plans() -> None:
    pooled, weight = drawn(2)
    table, rows, cache = rope_table(torch.arange(16)), torch.arange(2), empty_cache(1)
    with pytest.raises(ValueError, match="store_rows is a CUDA kernel and its operands are on cpu"):
        prepare_cuda.store(pooled, weight, EPS, table, rows, rows, cache)
    plan = torch.zeros(2, 16, dtype=torch.uint8)
    with pytest.raises(ValueError, match="out_loc is"):
        prepare_cuda.store_planned(pooled, plan, weight, EPS, table, rows.int(), cache, mode="decode")
    with pytest.raises(ValueError, match="plan is"):
        prepare_cuda.store_planned(pooled, plan[:1], weight, EPS, table, rows, cache, mode="decode")
