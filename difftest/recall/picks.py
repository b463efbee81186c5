"""The indexer's picks as SGLang returns them: decoding, the rules they must obey, and the difference of two servers.

Encoding (sglang/srt/state_capturer/indexer_topk.py and managers/tokenizer_manager.py, 0.5.23): base64 of little-endian
int32 [tokens - 1, layers, index_topk], request-relative entries, unordered, -1 padded; layer slot j is the j-th csa
layer; the last generated token has no row. Only the native `/generate` takes
`return_indexer_topk`, not the chat endpoint.
"""

import base64
import binascii
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .outcome import TOKENS_AN_ENTRY

Picks = NDArray[np.int32]
ROWS_AT_ONCE = 1024
"""Rows whose membership bitmaps are held at a time: 1,024 x 5,650 entries is 5.8 MB at 22,597 tokens."""


@dataclass(frozen=True)
class PickFinding:
    """A rule that a row of picks breaks: `in range`, `unique`, `count` or `padding`; `row` is the token's position."""

    rule: str
    layer: int
    row: int
    message: str


@dataclass(frozen=True)
class LayerDifference:
    """One csa layer (`layer` is the slot) compared over the rows that have more visible entries than picks.

    overlap  share of A's picks that B has too: mean, 1st percentile and worst; `worst_row` is the token of the worst.
    first_row, shared   token by token: how many picks both have, from token `first_row` on.
    """

    layer: int
    rows: int
    mean: float
    percentile_1: float
    worst: float
    worst_row: int
    only_a: tuple[int, ...]
    only_b: tuple[int, ...]
    first_row: int
    shared: tuple[int, ...]


def decode_picks(text: str, rows: int, topk: int) -> Picks:
    """`meta_info.indexer_topk` as [rows, layers, topk] int32; ValueError when its size is no multiple of a layer's."""
    try:
        raw = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"indexer_topk is not base64: {error}") from error
    row_bytes = rows * topk * np.dtype("<i4").itemsize
    if not raw or row_bytes <= 0 or len(raw) % row_bytes:
        raise ValueError(
            f"indexer_topk holds {len(raw):,} bytes, no multiple of {rows} tokens x {topk} picks; check --index-topk"
        )
    return np.frombuffer(raw, dtype="<i4").reshape(rows, len(raw) // row_bytes, topk)


def visible_entries(rows: int) -> NDArray[np.int64]:
    """[rows] entries visible to the token at each position: (position + 1) // 4."""
    return (np.arange(rows, dtype=np.int64) + 1) // TOKENS_AN_ENTRY


def check_rules(picks: Picks) -> list[PickFinding]:
    """The first broken rule of every layer: in range, unique, min(visible, k) of them, -1 only at the end."""
    rows, layers, topk = picks.shape
    visible = visible_entries(rows)
    expected = np.minimum(visible, topk)
    findings: list[PickFinding] = []
    for layer in range(layers):
        own = picks[:, layer, :]
        valid = own >= 0
        ordered = np.sort(own, axis=1)
        broken = {
            "in range": (own >= np.maximum(visible, 0)[:, None]).any(1) | (own < -1).any(1),
            "unique": ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(1),
            "count": valid.sum(1) != expected,
            "padding": (valid[:, 1:] & ~valid[:, :-1]).any(1),
        }
        for rule, bad in broken.items():
            if bad.any():
                row = int(bad.argmax())
                message = (
                    f"{int(bad.sum())} rows; row {row} sees {visible[row]} entries, {int(valid[row].sum())} picked"
                )
                findings.append(PickFinding(rule, layer, row, message))
                break
    return findings


def _members(picks: NDArray[np.int32], entries: int) -> NDArray[np.bool_]:
    """[rows, entries] whether an entry is picked; picks out of range are left out (`check_rules` reports them)."""
    rows, topk = picks.shape
    inside = (picks >= 0) & (picks < entries)
    members = np.zeros((rows, entries), dtype=bool)
    members[np.repeat(np.arange(rows), topk)[inside.ravel()], picks[inside]] = True
    return members


def compare_layers(left: Picks, right: Picks) -> Iterator[LayerDifference]:
    """Layer by layer, over the rows where selection is exercised. ValueError when the shapes differ or no row is."""
    if left.shape != right.shape:
        raise ValueError(
            f"picks have shapes {left.shape} and {right.shape}: the two servers saw different prompts or models"
        )
    rows, layers, topk = left.shape
    visible = visible_entries(rows)
    first = int(np.searchsorted(visible, topk, side="right"))
    if first >= rows:
        raise ValueError(f"selection is not exercised: {rows} tokens show {visible[-1]} entries, and {topk} are picked")
    entries = int(visible[-1])
    for layer in range(layers):
        shared = np.empty(rows - first, np.int64)
        for start in range(first, rows, ROWS_AT_ONCE):
            part = slice(start, min(rows, start + ROWS_AT_ONCE))
            both = _members(left[part, layer], entries) & _members(right[part, layer], entries)
            shared[start - first : part.stop - first] = both.sum(1)
        overlap = shared / topk
        worst = int(overlap.argmin())
        a, b = (set(picks[first + worst, layer].tolist()) - {-1} for picks in (left, right))
        yield LayerDifference(
            layer,
            len(overlap),
            float(overlap.mean()),
            float(np.percentile(overlap, 1)),
            float(overlap[worst]),
            first + worst,
            tuple(sorted(a - b)),
            tuple(sorted(b - a)),
            first,
            tuple(shared.tolist()),
        )


def needle_layers(picks: Picks, entries: range, last_rows: int) -> list[bool]:
    """By layer: whether any of the last `last_rows` tokens picks any entry of the needle."""
    tail = picks[-last_rows:]
    return [
        bool(np.isin(tail[:, layer], np.arange(entries.start, entries.stop)).any()) for layer in range(picks.shape[1])
    ]
