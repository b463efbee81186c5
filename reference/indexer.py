"""The indexer in fp64: keys, queries, head weights, scores and selection."""

import torch
from torch import Tensor

from .chunks import MAX_BYTES, slices
from .config import ModelConfig
from .hadamard import hadamard
from .inputs import LayerInputs
from .norm import rms_norm
from .rope import rotate


def index_key(pooled: Tensor, norm_weight: Tensor, eps: float, table: Tensor) -> Tensor:
    """Index keys [E, D] fp64: norm, rotation at the entry's position, Hadamard (contract K4).

    pooled [E, D], norm_weight [D], table [E, rope_dim / 2] of positions ratio * entry.
    """
    return hadamard(rotate(rms_norm(pooled, norm_weight, eps), table))


def indexer_inputs(inputs: LayerInputs) -> tuple[Tensor, Tensor]:
    """`index_query` and `index_weight` of a csa layer; ValueError for a layer without an indexer."""
    if inputs.index_query is None or inputs.index_weight is None:
        raise ValueError(f"a {inputs.kind} layer has no indexer: choose a csa layer")
    return inputs.index_query, inputs.index_weight


def index_query(query: Tensor, table: Tensor) -> Tensor:
    """Index queries [R, H, D] fp64: rotation at the row's own position, then Hadamard. table [R, rope_dim / 2]."""
    return hadamard(rotate(query, table))


def head_weight(weight: Tensor, config: ModelConfig) -> Tensor:
    """Effective head weight [R, H] fp64: weight * index_head_dim^-0.5 * index_n_heads^-0.5."""
    return weight.double() * config.index_scale


def score(q: Tensor, k: Tensor, w: Tensor, *, max_bytes: int = MAX_BYTES) -> Tensor:
    """Index scores [R, E] fp64: sum over heads of w * relu(q . k); ReLU before the weight (contract K5).

    q [R, H, D], k [E, D], w [R, H]. Temporaries stay within `max_bytes`: work is cut over rows and entries.
    """
    return _weighted_relu(q, k, w.double(), max_bytes)


def score_magnitude(q: Tensor, k: Tensor, w: Tensor, *, max_bytes: int = MAX_BYTES) -> Tensor:
    """Sum of the absolute terms of each score, [R, E] fp64: sum over heads of |w| * relu(q . k)."""
    return _weighted_relu(q, k, w.double().abs(), max_bytes)


def _weighted_relu(q: Tensor, k: Tensor, w: Tensor, max_bytes: int) -> Tensor:
    rows, heads, dim = q.shape
    entries = k.shape[0]
    out = torch.empty(rows, entries, dtype=torch.float64, device=q.device)
    # Half the budget for the dot products [rows, H, entries], the rest for the upcast keys and the sum.
    columns = max(1, min(entries, max_bytes // (4 * 8 * max(heads, dim))))
    for right in slices(entries, 1, columns):
        keys = k[right].double().T
        for left in slices(rows, 2 * 8 * heads * columns, max_bytes):
            dots = torch.unflatten((q[left].double().flatten(0, 1) @ keys).relu_(), 0, (-1, heads))
            out[left, right] = (w[left, None] @ dots)[:, 0]
    return out


def score_layer(inputs: LayerInputs, q: Tensor, k: Tensor, w: Tensor, *, max_bytes: int = MAX_BYTES) -> Tensor:
    """Scores of a layer's rows against their own request's entries, [R, max visible] fp64, -inf past a row's `visible`.

    q [R, H, D], k [E, D] packed over requests, w [R, H].
    """
    return _per_request(inputs, q, k, w.double(), max_bytes)


def score_magnitude_layer(
    inputs: LayerInputs, q: Tensor, k: Tensor, w: Tensor, *, max_bytes: int = MAX_BYTES
) -> Tensor:
    """`score_magnitude` laid out as `score_layer`; -inf past a row's `visible`."""
    return _per_request(inputs, q, k, w.double().abs(), max_bytes)


def _per_request(inputs: LayerInputs, q: Tensor, k: Tensor, w: Tensor, max_bytes: int) -> Tensor:
    visible = inputs.visible
    width = int(visible.max()) if len(visible) else 0
    out = torch.full((len(visible), width), -torch.inf, dtype=torch.float64, device=q.device)
    for request in range(len(inputs.lengths)):
        rows = (inputs.row_request == request).nonzero()[:, 0]
        if not len(rows):
            continue
        count = int(visible[rows].max())
        first = inputs.entry_offset[request]
        out[rows, :count] = _weighted_relu(q[rows], k[first : first + count], w[rows], max_bytes)
    hidden = torch.arange(width, device=q.device) >= visible[:, None]
    return out.masked_fill_(hidden, -torch.inf)


def select(score: Tensor, visible: Tensor, k: int, *, max_bytes: int = MAX_BYTES) -> Tensor:
    """The k best visible entries of each row, [R, k] int32, ascending entry numbers, then -1 (contract K7).

    score [R, E] any float dtype, visible [R]. Columns from `visible` on are never read for their value; NaN is never
    selected; among equal scores at the cut the lower entry wins. With at most k candidates all of them are selected.
    """
    chosen = torch.full((score.shape[0], k), -1, dtype=torch.int32, device=score.device)
    if not score.shape[1] or not k:
        return chosen
    for rows in slices(score.shape[0], 24 * score.shape[1], max_bytes):
        chosen[rows] = _select_rows(score[rows], visible[rows], k)
    return chosen


def _select_rows(score: Tensor, visible: Tensor, k: int) -> Tensor:
    rows, width = score.shape
    valid = (torch.arange(width, device=score.device) < visible[:, None]) & ~score.isnan()
    ranked = score.masked_fill(~valid, -torch.inf)
    kth = ranked.topk(min(k, width), dim=1).values[:, -1:]
    above = valid & (ranked > kth)
    level = valid & (ranked == kth)
    room = k - above.sum(1, keepdim=True)
    picked = above | (level & (level.cumsum(1) <= room))
    row, entry = picked.nonzero(as_tuple=True)
    place = picked.cumsum(1)[row, entry] - 1
    chosen = torch.full((rows, k), -1, dtype=torch.int32, device=score.device)
    chosen[row, place] = entry.to(torch.int32)
    return chosen
