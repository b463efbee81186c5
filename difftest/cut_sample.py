"""What a report draws of a selection: boundary gaps, and the entries around the cut of a few rows, as plain numbers."""

from typing import Any

import torch
from torch import Tensor

from .reference.inputs import LayerInputs
from .selection import as_mask
from .trace import Trace

ROWS = 2
"""Rows whose cut is kept: the one with the lowest recall, and one in the middle."""
BESIDE = 16
"""Entries kept on either side of the cut."""
SWAPS = 16
"""Swapped entries kept beyond those, the furthest from the cut first."""
GAPS = 128
"""Boundary gaps kept, evenly over the rows."""
DIGITS = 5


def cut_facts(
    inputs: LayerInputs, trace: Trace, baseline: Trace, share: Tensor, rows: Tensor, gaps: list[float]
) -> dict[str, Any]:
    """Facts of an accumulated record of `topk`.

    share [n] recall of the exercised `rows` [n]; gaps: their boundary gaps in units of the error bound.
    """
    worst = int(rows[int(share.argmin())])
    middle = int(rows[int(share.argsort()[len(share) // 2])])
    step = -(-len(gaps) // GAPS)
    return {
        "gaps": [_short(gap) for gap in gaps[::step]],
        "cuts": [_cut(inputs, trace, baseline, row) for row in dict.fromkeys((worst, middle))][:ROWS],
    }


def _cut(inputs: LayerInputs, trace: Trace, baseline: Trace, row: int) -> dict[str, Any]:
    """Entries around one row's cut, best first: their rank, both scores, and who selected them."""
    count, k = int(inputs.visible[row]), trace.value("topk").shape[1]
    want, got = (side.value("score")[row, :count].double() for side in (baseline, trace))
    theirs, mine = (as_mask(side.value("topk")[row : row + 1], count)[0] for side in (baseline, trace))
    order = want.argsort(descending=True)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(count, device=order.device)
    near = order[max(0, k - BESIDE) : k + BESIDE]
    swapped = (mine != theirs).nonzero()[:, 0]
    far = swapped[(rank[swapped] - k).abs().argsort(descending=True)][:SWAPS]
    entries = torch.cat((near, far)).unique()
    entries = entries[rank[entries].argsort()]
    return {
        "row": row,
        "request": int(inputs.row_request[row]),
        "position": int(inputs.row_position[row]),
        "visible": count,
        "k": k,
        "recall": _short(float((mine & theirs).sum()) / k),
        "swapped": len(swapped) // 2,
        "cut": _short(float(want[order[k - 1]])),
        "rank": (rank[entries] + 1).tolist(),
        "entry": entries.tolist(),
        "want": [_short(value) for value in want[entries].tolist()],
        "got": [_short(value) for value in got[entries].tolist()],
        "mine": "".join("1" if one else "0" for one in mine[entries].tolist()),
    }


def _short(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
