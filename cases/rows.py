"""Which query tokens of a case are compared, and which tokens their windows cover."""

import torch
from torch import Tensor

from ..reference.inputs import Step
from .case import Case
from .draw import Draw

PAGE_SIZE = 64
"""Entries of a page, of the index-K cache as of the main one."""


def sampled_rows(case: Case, ratio: int, draw: Draw) -> tuple[Tensor, Tensor]:
    """Request and request-relative position of every compared row, [R] int64 each, in the order the tokens arrive.

    Decode: every decoded token. `case.rows` 0: every token of every step. Otherwise `case.rows` tokens, shared evenly
    by the requests; each request's share starts with `_landmarks` and is filled with uniformly drawn positions.
    """
    steps = case.steps()
    if case.mode == "decode":
        return _in_order(steps[1:], None)
    if not case.rows:
        return _in_order(steps, None)
    chosen: list[set[int]] = []
    for request, length in enumerate(case.lengths):
        share = case.rows // len(case.lengths) + (request < case.rows % len(case.lengths))
        spans = [span for step in steps for span in step if span.request == request]
        first = spans[0].start if case.mode != "resume" else spans[-1].start
        starts = [span.start for span in spans[1:]]
        wanted = _landmarks(first, length, ratio, case.config.index_topk, starts)[: max(1, share)]
        fill = draw.permutation(f"rows/{request}", length - first) + first
        for position in fill.tolist():
            if len(wanted) >= share:
                break
            if position not in wanted:
                wanted.append(position)
        chosen.append(set(wanted))
    return _in_order(steps, chosen)


def _landmarks(first: int, length: int, ratio: int, topk: int, starts: list[int]) -> list[int]:
    """Positions in [first, length) at which faults show, most telling first.

    The last token and the three before it (every residue mod 4), the last token that sees `topk` entries and its
    neighbours in visibility, the last page edge in entries, the first tokens after a step boundary, the first token.
    """
    last_page = (length // ratio // PAGE_SIZE if ratio else 0) * PAGE_SIZE
    sees = [topk + 1, topk, topk - 1, last_page, last_page + 1]
    edges = [ratio * entries - 1 for entries in sees] if ratio else []
    residues = [length - back for back in range(1, 5)]
    boundaries = [token for start in reversed(starts) for token in (start, start - 1)]
    ordered = [*residues, *edges, *boundaries[:6], first]
    return [token for token in dict.fromkeys(ordered) if first <= token < length]


def _in_order(steps: tuple[Step, ...], chosen: list[set[int]] | None) -> tuple[Tensor, Tensor]:
    request, position = [], []
    for step in steps:
        for span in step:
            tokens = [
                token for token in range(span.start, span.stop) if chosen is None or token in chosen[span.request]
            ]
            request += [span.request] * len(tokens)
            position += tokens
    return torch.tensor(request, dtype=torch.int64), torch.tensor(position, dtype=torch.int64)


def window_of(request: Tensor, position: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens that some row's window covers, and where each row finds its own.

    request, position [R] int64. Returns window_request [W], window_position [W] (ordered by both) and window_index
    [R, size] into W: column j is token position - (size - 1) + j, -1 before token 0.
    """
    token = position[:, None] - torch.arange(size - 1, -1, -1)
    bound = int(position.max()) + 1 if len(position) else 1
    key = torch.where(token < 0, -1, request[:, None] * bound + token)
    distinct = torch.unique(key[key >= 0])
    index = torch.where(key < 0, -1, torch.searchsorted(distinct, key))
    return distinct // bound, distinct % bound, index
