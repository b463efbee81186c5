"""The index scores by gathering: every key of every row is copied first. What paged kernels are measured against."""

import math

import torch
from torch import Tensor

from .layout import PAGE_ENTRIES, read_slots


def gathered_scores(
    query: Tensor,
    weight: Tensor,
    cache: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    request: Tensor | None = None,
    *,
    width: int | None = None,
) -> Tensor:
    """The same scores as `score.paged_scores`, fp32 [R, width], -inf past each row's length, with torch operators.

    Takes about R * width * (256 + 4 H + 4 H) bytes beyond its result: keys [R, width, 128] bf16, then two fp32 [R, H,
    width]. This is the version that runs out of memory at long contexts; keys are gathered for every row, page by
    page entry.
    """
    request = torch.arange(len(query), device=query.device) if request is None else request
    if width is None:
        width = max(int(lengths.max()), 0) if len(lengths) else 0
    entry = torch.arange(width, device=query.device)
    pages = page_table.clamp_min(0)[request][:, entry // PAGE_ENTRIES].long()
    keys = read_slots(cache, pages * PAGE_ENTRIES + entry % PAGE_ENTRIES)
    terms = _products(query, keys).relu_() * weight[:, :, None]
    return terms.sum(1).masked_fill_(entry[None, :] >= lengths[:, None], -math.inf)


def _products(query: Tensor, keys: Tensor) -> Tensor:
    """q . k in fp32 of bf16 [R, H, 128] and [R, width, 128]: [R, H, width]."""
    if query.is_cuda:
        return torch.bmm(query, keys.transpose(1, 2), out_dtype=torch.float32)
    return query.float() @ keys.float().transpose(1, 2)
