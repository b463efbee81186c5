"""Sampled rows: the places where faults show are among them, in the order tokens arrive."""

import pytest
import torch
from difftest.cases.case import Case
from difftest.cases.draw import Draw
from difftest.cases.rows import PAGE_SIZE, sampled_rows, window_of

RATIO = 4


def rows_of(case: Case, ratio: int = RATIO) -> list[tuple[int, int]]:
    request, position = sampled_rows(case, ratio, Draw(case.seed(2)))
    return list(zip(request.tolist(), position.tolist(), strict=True))


@pytest.mark.parametrize("length", [2117, 4133, 22597])
def test_landmarks_of_one_request(length: int) -> None:
    case = Case(f"rows-{length}", "gaussian", (length,), rows=16)
    positions = [position for _, position in rows_of(case)]
    assert len(positions) == len(set(positions)) == 16
    assert positions == sorted(positions)
    assert length - 1 in positions
    assert {position % RATIO for position in positions} == {0, 1, 2, 3}
    seen = {(position + 1) // RATIO for position in positions}
    k = case.config.index_topk
    assert {k - 1, k, k + 1} <= seen
    assert length // RATIO // PAGE_SIZE * PAGE_SIZE in seen, "the last page edge"


def test_shares_cover_every_request() -> None:
    case = Case("rows-ragged", "gaussian", (2999, 6, 2570), rows=12)
    found = rows_of(case)
    assert {request for request, _ in found} == {0, 1, 2}
    for request, length in enumerate(case.lengths):
        assert (request, length - 1) in found


def test_chunk_starts_are_sampled_and_rows_follow_the_steps() -> None:
    case = Case("rows-chunked", "gaussian", (4133, 2999), mode="chunked", chunk=1021, rows=32)
    found = rows_of(case)
    assert (0, 3 * 1021) in found and (0, 3 * 1021 - 1) in found
    steps = [position // 1021 for _, position in found]
    assert steps == sorted(steps)


def test_decode_rows_are_the_decoded_tokens_step_by_step() -> None:
    case = Case("rows-decode", "gaussian", (20, 31), mode="decode", decode_tokens=3, rows=1)
    assert rows_of(case) == [(0, 17), (1, 28), (0, 18), (1, 29), (0, 19), (1, 30)]


def test_resume_rows_lie_in_the_resumed_part() -> None:
    case = Case("rows-resume", "gaussian", (4133,), mode="resume", chunk=3001, rows=20)
    positions = [position for _, position in rows_of(case)]
    assert min(positions) >= 3001 and 3001 in positions


def test_zero_rows_means_every_token() -> None:
    case = Case("rows-all", "gaussian", (9, 4), rows=0)
    assert rows_of(case) == [(0, token) for token in range(9)] + [(1, token) for token in range(4)]


def test_window_of_nothing() -> None:
    none = torch.empty(0, dtype=torch.int64)
    request, position, index = window_of(none, none, 8)
    assert len(request) == len(position) == 0 and index.shape == (0, 8)
