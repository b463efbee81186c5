"""Operands of the index kernels with everything that they may not touch marked: poison, guards, stray pages."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..kernels.layout import ENTRY_DIM, PAGE_BYTES, PAGE_ENTRIES, POISON_BYTE, empty_cache, write_slots

HEADS = 64
PAGE_PADDING = 1024
SPARE_PAGES = 3
STRAY_PAGE = (1 << 31) - 1
"""A page id that no pool has: a kernel that follows it faults, and the interpreter with it."""
GUARD = 1e30
"""What guards around an output hold."""
GUARD_ROWS, GUARD_COLUMNS = 2, 64


@dataclass(frozen=True)
class Scene:
    """Rows of several requests, `next_n` rows each; request n has counts[n] keys on shuffled pages of a poisoned pool.

    query bf16 [R, 64, 128], weight fp32 [R, 64], keys bf16 [E, 128] of all requests in order, cache uint8 [pages, page
    stride], table int32 [N, pages] (a view within guards of stray pages), lengths int64 [R].
    """

    query: Tensor
    weight: Tensor
    keys: Tensor
    cache: Tensor
    table: Tensor
    lengths: Tensor
    counts: tuple[int, ...]
    next_n: int

    @property
    def width(self) -> int:
        return max(self.counts)

    def request(self, number: int) -> "Scene":
        """The rows of one request alone, in a batch of one."""
        own = slice(number * self.next_n, (number + 1) * self.next_n)
        return replace(
            self,
            query=self.query[own],
            weight=self.weight[own],
            table=self.table[number : number + 1],
            lengths=self.lengths[own],
            counts=(self.counts[number],),
        )

    def poisoned(self, byte: int) -> "Scene":
        """The same keys in a pool whose other bytes are all `byte`."""
        cache = empty_cache(len(self.cache), self.cache.device, self.cache.shape[1], byte)
        write_slots(cache, self.slots(), self.keys)
        return replace(self, cache=cache)

    def slots(self) -> Tensor:
        """Pool slots of all keys in order, int64 [E]."""
        parts = []
        for number, count in enumerate(self.counts):
            entry = torch.arange(count, device=self.table.device)
            page = self.table[number, entry // PAGE_ENTRIES].long()
            parts.append(page * PAGE_ENTRIES + entry % PAGE_ENTRIES)
        return torch.cat(parts)


def scene(counts: tuple[int, ...], next_n: int, device: str, seed: int) -> Scene:
    """A scene; the rows of a request see its last keys one by one, as the tokens of one step do."""
    generator = torch.Generator().manual_seed(seed)
    pages = [-(-count // PAGE_ENTRIES) for count in counts]
    order = torch.randperm(sum(pages) + SPARE_PAGES, generator=generator).split([*pages, SPARE_PAGES])
    guarded = torch.full((len(counts) + 2, max(pages) + 2), STRAY_PAGE, dtype=torch.int32)
    table = guarded.to(device)[1:-1, 1:-1]
    for number, own in enumerate(order[: len(counts)]):
        table[number, : len(own)] = own.to(device)
    ends = torch.tensor(counts)[:, None] - next_n + 1 + torch.arange(next_n)
    rows = len(counts) * next_n
    bare = Scene(
        torch.randn(rows, HEADS, ENTRY_DIM, generator=generator).bfloat16().to(device),
        torch.randn(rows, HEADS, generator=generator).to(device),
        torch.randn(sum(counts), ENTRY_DIM, generator=generator).bfloat16().to(device),
        torch.empty(sum(pages) + SPARE_PAGES, PAGE_BYTES + PAGE_PADDING, dtype=torch.uint8, device=device),
        table,
        ends.clamp_min(0).flatten().to(device),
        counts,
        next_n,
    )
    return bare.poisoned(POISON_BYTE)


def guarded_output(rows: int, width: int, device: str | torch.device) -> tuple[Tensor, Tensor]:
    """(buffer, the [rows, width] view inside it): guards above, below, left and right of every row."""
    buffer = torch.full((rows + 2 * GUARD_ROWS, width + 2 * GUARD_COLUMNS), GUARD, device=device)
    return buffer, buffer[GUARD_ROWS:-GUARD_ROWS, GUARD_COLUMNS:-GUARD_COLUMNS]
