"""SGLang's compress plans as plain positions and slots.

A plan says which rows of a step's pooled keys are entries. Layouts, 16 bytes a row (SGLang 0.5.23, `compress_v2.cuh`):

    prefill   uint32 seq_len | uint16 ragged_id | uint16 buffer_len | int32 read_page_0 | int32 read_page_1
    decode    uint32 seq_len | int32 write_loc | int32 read_page_0 | int32 read_page_1

seq_len is the tokens of the request up to and with the entry's last, so the entry's position is seq_len - ratio. A
prefill row of all ones is no entry; its slot is that of the query token `ragged_id`. A decode row is an entry where
seq_len is a multiple of the ratio; its slot is that of its own row.
"""

import torch
from torch import Tensor

from .layout import NO_SLOT

PLAN_BYTES = 16
NO_ENTRY = 0xFFFFFFFF
RAGGED_ID_MASK = 0xFFFF


def check_plan(plan: Tensor, rows: int) -> None:
    """Raises ValueError unless `plan` is contiguous uint8 [rows, 16]."""
    if plan.dtype != torch.uint8 or plan.shape != (rows, PLAN_BYTES) or not plan.is_contiguous():
        raise ValueError(f"plan is {plan.dtype} {list(plan.shape)}: give contiguous uint8 [{rows}, {PLAN_BYTES}]")


def prefill_rows(plan: Tensor, out_loc: Tensor, ratio: int) -> tuple[Tensor, Tensor]:
    """(positions, slots), int64 [N], of a prefill plan uint8 [N, 16]; slot -1 and position 0 where a row is no entry.

    out_loc [T] int64: slot of each query token of the step.
    """
    check_plan(plan, len(plan))
    words = plan.view(torch.int32).long()
    length = words[:, 0] & NO_ENTRY
    entry = length != NO_ENTRY
    token = torch.where(entry, words[:, 1] & RAGGED_ID_MASK, 0)
    return torch.where(entry, length - ratio, 0), torch.where(entry, out_loc[token], NO_SLOT)


def decode_rows(plan: Tensor, out_loc: Tensor, ratio: int) -> tuple[Tensor, Tensor]:
    """(positions, slots), int64 [N], of a decode plan uint8 [N, 16] and its slots out_loc [N] int64."""
    check_plan(plan, len(out_loc))
    length = plan.view(torch.int32)[:, 0].long() & NO_ENTRY
    entry = length % ratio == 0
    return torch.where(entry, length - ratio, 0), torch.where(entry, out_loc, NO_SLOT)
