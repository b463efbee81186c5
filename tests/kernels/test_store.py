"""The store: right values in the right slots, and nothing else touched."""

from collections.abc import Callable

import pytest
import torch
from difftest.kernels.layout import (
    NO_SLOT,
    PAGE_BYTES,
    PAGE_ENTRIES,
    POISON_BYTE,
    elements,
    empty_cache,
    read_slots,
)
from difftest.kernels.rope import rope_table
from difftest.kernels.store import store
from difftest.reference.config import load_config
from difftest.reference.indexer import index_key
from difftest.reference.norm import rms_norm
from difftest.reference.rope import rope_table as published
from torch import Tensor

EPS = 1e-6
FP32_UNIT = 2.0**-24
FLASH = load_config("v4-flash")


def exact_keys(pooled: Tensor, weight: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Keys in fp64 and the radius of fp32 arithmetic around them.

    Every output is a sum of 128 rotated dims over sqrt(128). The mean of 128 squares is off by at most 128 units, its
    root by half of that; square root, division, two products, a rotation (3 units), 7 butterfly stages and the scale
    add less than 16: 80 units of the sum of magnitudes over sqrt(128). A rotation mixes the two dims of a pair, hence
    the factor 2.
    """
    table = published(FLASH, "csa", positions.cpu())
    keys = index_key(pooled.cpu(), weight.cpu(), EPS, table)
    magnitude = rms_norm(pooled.cpu(), weight.cpu(), EPS).abs().sum(-1, keepdim=True) * 128**-0.5
    return keys, 2 * 80 * FP32_UNIT * magnitude


def drawn(entries: int, device: str) -> tuple[Tensor, Tensor]:
    """Pooled keys whose scale varies by entry, and a norm weight."""
    pooled = torch.randn(entries, 128) * torch.exp2(torch.randint(-12, 12, (entries, 1)).float())
    return pooled.to(device), (1 + 0.1 * torch.randn(128)).to(device)


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("entries", [1, 5, 333])
def test_equals_the_reference(
    device: str, entries: int, index: torch.dtype, assert_rounds: Callable[..., None]
) -> None:
    pooled, weight = drawn(entries, device)
    positions = 4 * torch.randperm(1000)[:entries] + 4
    slots = torch.randperm(8 * PAGE_ENTRIES)[:entries]
    cache = empty_cache(8, device, PAGE_BYTES + 48, POISON_BYTE)
    table = rope_table(torch.arange(4008)).to(device)
    store(pooled, weight, EPS, table, positions.to(device, index), slots.to(device, index), cache)
    keys, rad = exact_keys(pooled, weight, positions)
    assert_rounds(read_slots(cache, slots.to(device)), keys, rad)
    assert int(elements(cache).isnan().all(-1).sum()) == 8 - len((slots // PAGE_ENTRIES).unique())
    assert int(elements(cache).isnan().sum()) == (8 * PAGE_ENTRIES - entries) * 128
    assert (cache[:, PAGE_BYTES:] == POISON_BYTE).all()


def test_negative_slots_are_skipped(device: str) -> None:
    """Slots 3, -1, 7, -1, 0 over a canary: only 3, 7 and 0 change, and padding rows may hold anything."""
    pooled, weight = drawn(5, device)
    pooled[1] = torch.nan
    cache = empty_cache(2, device, fill=0xA5)
    slots = torch.tensor([3, NO_SLOT, 7, -5, 0], device=device)
    positions = torch.tensor([4, 1 << 40, 8, -7, 12], device=device)
    store(pooled, weight, EPS, rope_table(torch.arange(16)).to(device), positions, slots, cache)
    changed = (cache.view(2 * PAGE_ENTRIES, -1) != 0xA5).any(1).nonzero()[:, 0]
    assert changed.tolist() == [0, 3, 7]
    assert read_slots(cache, slots[slots >= 0]).isfinite().all()


def test_stored_in_parts_equals_stored_at_once(device: str) -> None:
    pooled, weight = drawn(200, device)
    positions = 4 * torch.arange(200, device=device)
    slots = torch.randperm(4 * PAGE_ENTRIES).to(device)[:200]
    table = rope_table(torch.arange(800)).to(device)
    whole, parts = (empty_cache(4, device, fill=POISON_BYTE) for _ in range(2))
    store(pooled, weight, EPS, table, positions, slots, whole)
    for part in torch.arange(200).split([1, 63, 64, 65, 7]):
        part = part.to(device)
        store(pooled[part], weight, EPS, table, positions[part], slots[part], parts)
    assert torch.equal(whole, parts)


@pytest.mark.parametrize("page", [0, 131_071, 131_072, 262_144])
def test_page_offsets_are_64_bit(device: str, page: int, assert_rounds: Callable[..., None]) -> None:
    """Byte offsets pass 2^31 at page 131,072, element offsets at 262,144. The pool is virtual but for the pages
    touched.
    """
    pooled, weight = drawn(2, device)
    cache = empty_cache(262_145, device)
    slots = torch.tensor([page * PAGE_ENTRIES, page * PAGE_ENTRIES + 63], device=device)
    positions = torch.tensor([4, 8], device=device)
    store(pooled, weight, EPS, rope_table(torch.arange(16)).to(device), positions, slots, cache)
    assert_rounds(read_slots(cache, slots), *exact_keys(pooled, weight, positions))


def test_zero_entries_and_a_zero_key(device: str) -> None:
    table, weight = rope_table(torch.arange(8)).to(device), torch.ones(128, device=device)
    cache = empty_cache(1, device, fill=POISON_BYTE)
    empty = torch.empty(0, dtype=torch.int64, device=device)
    store(torch.empty(0, 128, device=device), weight, EPS, table, empty, empty, cache)
    assert (cache == POISON_BYTE).all()
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    store(torch.zeros(1, 128, device=device), weight, EPS, table, zero, zero, cache)
    assert (read_slots(cache, zero) == 0).all()


def test_refused_operands() -> None:
    pooled, weight = drawn(2, "cpu")
    table, index, cache = rope_table(torch.arange(16)), torch.arange(2), empty_cache(1)
    with pytest.raises(ValueError, match="pooled is"):
        store(pooled.double(), weight, EPS, table, index, index, cache)
    with pytest.raises(ValueError, match="norm_weight is"):
        store(pooled, weight.bfloat16(), EPS, table, index, index, cache)
    with pytest.raises(ValueError, match="positions is"):
        store(pooled, weight, EPS, table, index[:1], index, cache)
    with pytest.raises(ValueError, match="slots is"):
        store(pooled, weight, EPS, table, index, index.float(), cache)
