"""Compress plans, packed here field by field as SGLang's structs are."""

import struct

import pytest
import torch
from difftest.kernels.plan import PLAN_BYTES, decode_rows, prefill_rows
from torch import Tensor


def prefill_plan(rows: list[tuple[int, int] | None]) -> Tensor:
    """uint8 [N, 16]: (seq_len, ragged_id) of each entry, None for a row that is none. The unread fields hold
    garbage.
    """
    packed = [
        struct.pack("<IHHii", 0xFFFFFFFF, 0, 0, -1, -1) if row is None else struct.pack("<IHHii", *row, 5, 77, -3)
        for row in rows
    ]
    return torch.frombuffer(bytearray(b"".join(packed)), dtype=torch.uint8).view(-1, PLAN_BYTES)


def decode_plan(lengths: list[int]) -> Tensor:
    """uint8 [N, 16] of the requests' lengths."""
    packed = [struct.pack("<Iiii", length, 9, -2, 3) for length in lengths]
    return torch.frombuffer(bytearray(b"".join(packed)), dtype=torch.uint8).view(-1, PLAN_BYTES)


def test_prefill_rows_in_any_order() -> None:
    out_loc = torch.arange(1000, 1000 + 65_536)
    plan = prefill_plan([(8, 7), None, (1_048_576, 65_535), (4, 3)])
    positions, slots = prefill_rows(plan, out_loc, 4)
    assert positions.tolist() == [4, 0, 1_048_572, 0]
    assert slots.tolist() == [1007, -1, 66_535, 1003]


def test_decode_rows_complete_at_multiples_of_the_ratio() -> None:
    positions, slots = decode_rows(decode_plan([3, 4, 5, 1_048_576]), torch.tensor([10, 11, 12, 13]), 4)
    assert positions.tolist() == [0, 0, 0, 1_048_572]
    assert slots.tolist() == [-1, 11, -1, 13]


def test_refused_plans() -> None:
    with pytest.raises(ValueError, match="plan is"):
        decode_rows(decode_plan([4]), torch.tensor([1, 2]), 4)
    with pytest.raises(ValueError, match="plan is"):
        prefill_rows(prefill_plan([None]).int(), torch.tensor([1]), 4)
