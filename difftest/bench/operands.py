"""Random operands of the index kernels: pools far larger than the L2 cache, shuffled pages, several tables."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..kernels.layout import ENTRY_DIM, PAGE_BYTES, PAGE_ENTRIES

HEADS = 64
SCALE_BYTES = 4
FP8_PAGE_BYTES = PAGE_ENTRIES * (ENTRY_DIM + SCALE_BYTES)
POOL_PAGES = 70_000
"""1.1 GB of bf16 keys, 0.6 GB of fp8 ones."""
MOST_TABLES = 16
SEED = 20260101
CHUNK = 10_000


class Pools:
    """The same keys in both formats, made when first asked for, and one shuffle of their pages."""

    def __init__(self, pages: int = POOL_PAGES) -> None:
        self.pages = pages
        self.generator = torch.Generator("cuda").manual_seed(SEED)
        self.shuffle = torch.randperm(pages, device="cuda", generator=self.generator).to(torch.int32)

    @cached_property
    def bf16(self) -> Tensor:
        """uint8 [pages, 16384]."""
        pool = torch.empty(self.pages, PAGE_BYTES, dtype=torch.uint8, device="cuda")
        pool.view(torch.bfloat16).normal_(generator=self.generator)
        return pool

    @cached_property
    def fp8(self) -> Tensor:
        """uint8 [pages, 8448]: 64 x 128 codes of the bf16 keys at scale 1, then 64 scales."""
        pool = torch.empty(self.pages, FP8_PAGE_BYTES, dtype=torch.uint8, device="cuda")
        codes = PAGE_ENTRIES * ENTRY_DIM
        for at in range(0, self.pages, CHUNK):
            keys = self.bf16[at : at + CHUNK].view(torch.bfloat16)
            pool[at : at + CHUNK, :codes] = keys.to(torch.float8_e4m3fn).view(torch.uint8)
        ones = torch.ones(PAGE_ENTRIES, device="cuda").view(torch.uint8)
        pool[:, codes:] = ones
        return pool

    def tables(self, lengths: Sequence[int]) -> list[Tensor]:
        """Page tables int32 [N, pages of the longest] on pages of their own, as many as the pool holds."""
        counts = [-(-length // PAGE_ENTRIES) for length in lengths]
        made = []
        for number in range(max(1, min(MOST_TABLES, self.pages // max(1, sum(counts))))):
            at = number * sum(counts)
            table = torch.zeros(len(counts), max(counts), dtype=torch.int32, device="cuda")
            for request, count in enumerate(counts):
                table[request, :count] = self.shuffle[at : at + count]
                at += count
            made.append(table)
        return made


@dataclass(frozen=True)
class Rows:
    """Query rows in both formats: bf16 [R, 64, 128], e4m3 codes of the same, and head weights fp32 [R, 64]."""

    query: Tensor
    codes: Tensor
    weight: Tensor


def rows(count: int, generator: torch.Generator) -> Rows:
    query = torch.randn(count, HEADS, ENTRY_DIM, device="cuda", generator=generator).bfloat16()
    weight = torch.randn(count, HEADS, device="cuda", generator=generator)
    return Rows(query, query.to(torch.float8_e4m3fn), weight)
