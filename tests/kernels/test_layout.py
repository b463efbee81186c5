"""The byte layout: what is where, what stays untouched, what is refused."""

import pytest
import torch
from difftest.kernels.layout import (
    ENTRY_BYTES,
    ENTRY_DIM,
    PAGE_BYTES,
    PAGE_ENTRIES,
    POISON_BYTE,
    bytes_per_token,
    check_cache,
    empty_cache,
    move_slots,
    read_slots,
    write_slots,
)


@pytest.mark.parametrize("pattern", ["entry number", "channel number"])
def test_entry_is_256_contiguous_bytes(pattern: str) -> None:
    """One full page whose value is the entry number, or the channel number: any other tiling moves some of it."""
    cache = empty_cache(3, page_stride=PAGE_BYTES + 64, fill=POISON_BYTE)
    entry = torch.arange(PAGE_ENTRIES, dtype=torch.bfloat16)[:, None].expand(-1, ENTRY_DIM)
    channel = torch.arange(ENTRY_DIM, dtype=torch.bfloat16).expand(PAGE_ENTRIES, -1)
    page = (entry if pattern == "entry number" else channel).contiguous()
    write_slots(cache, PAGE_ENTRIES + torch.arange(PAGE_ENTRIES), page)
    assert torch.equal(cache[1, :PAGE_BYTES], page.view(torch.uint8).flatten())
    assert torch.equal(read_slots(cache, torch.tensor([64 + 17])), page[17:18])
    assert (cache[1, PAGE_BYTES:] == POISON_BYTE).all() and (cache[[0, 2]] == POISON_BYTE).all()


def test_move_touches_only_its_targets() -> None:
    """Accepted draft tokens move by slot number, not by page number."""
    cache = empty_cache(3)
    cache.random_()
    before = cache.clone()
    source, target = torch.tensor([65, 130, 63]), torch.tensor([2, 66, 64])
    move_slots(cache, source, target)
    assert torch.equal(read_slots(cache, target).view(torch.int16), read_slots(before, source).view(torch.int16))
    kept = [slot for slot in range(3 * PAGE_ENTRIES) if slot not in target.tolist()]
    left = read_slots(cache, torch.tensor(kept)).view(torch.int16)
    assert torch.equal(left, read_slots(before, torch.tensor(kept)).view(torch.int16))


def test_overlapping_moves_read_before_they_write() -> None:
    cache = empty_cache(1)
    write_slots(cache, torch.arange(3), torch.arange(3).bfloat16()[:, None].expand(3, ENTRY_DIM))
    move_slots(cache, torch.tensor([0, 1]), torch.tensor([1, 2]))
    assert read_slots(cache, torch.arange(3))[:, 0].tolist() == [0, 0, 1]


def test_bytes_per_token_of_21_layers() -> None:
    assert ENTRY_BYTES == 256
    assert bytes_per_token(21) == 1344.0


@pytest.mark.parametrize(
    "cache",
    [
        torch.empty(2, PAGE_BYTES, dtype=torch.int8),
        torch.empty(2, PAGE_BYTES - 16, dtype=torch.uint8),
        torch.empty(2, PAGE_BYTES + 8, dtype=torch.uint8),
        torch.empty(2 * PAGE_BYTES, dtype=torch.uint8),
        torch.empty(2, PAGE_BYTES + 16, dtype=torch.uint8)[:, 1:-15],
        torch.empty(PAGE_BYTES, 2, dtype=torch.uint8).T,
    ],
    ids=["dtype", "short", "unaligned stride", "flat", "unaligned base", "transposed"],
)
def test_refused_pools(cache: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"cache|page stride"):
        check_cache(cache)
