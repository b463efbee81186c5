"""The needle family: one planted entry a row that DeepSeek selects, at a chosen depth and with a chosen margin."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize

from ..reference.inputs import LayerInputs
from ..reference.rope import rope_table, rotate
from .draw import Draw
from .planting import plant_pooled, pooled_for_key, pooled_for_latent, row_scores, sampled_keys, scorer_queries

DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
SAMPLE = 512
"""Background entries whose scores give a row's mean and standard deviation (3 % accurate)."""

BISECTIONS = 40
REACH = 0.95
"""Largest share of its row's best possible score that a needle is given."""

ASCENTS = 20
STARTS = 8
"""Random directions a row may start from; the worst of eight scores below the row's mean but for one row in 256."""

NEEDLE_HEADS = 8
"""Attention heads whose queries a needle's latent answers: its logit is then about sqrt(C / NEEDLE_HEADS) = 8 for
them, so that they look at the needle more than at all other keys together, and losing it shows in the output."""


def needle_entries(inputs: LayerInputs, depth: float | Sequence[float] = DEPTHS) -> Tensor:
    """The entry planted for each row, [R] int64, -1 for a row that sees fewer than two entries.

    Row r takes depth r modulo the number of depths, as a share of its visible entries; rows of one request take
    distinct entries (the next lower free one).
    """
    depths = list(depth) if isinstance(depth, Sequence) else [depth]
    taken: set[tuple[int, int]] = set()
    chosen = []
    for row, (request, visible) in enumerate(zip(inputs.row_request.tolist(), inputs.visible.tolist(), strict=True)):
        entry = min(visible - 1, int(depths[row % len(depths)] * visible))
        while entry > 0 and (request, entry) in taken:
            entry -= 1
        entry = entry if entry > 0 and (request, entry) not in taken else -1
        taken.add((request, entry))
        chosen.append(entry)
    return torch.tensor(chosen, dtype=torch.int64)


def needle(
    inputs: LayerInputs,
    draw: Draw,
    *,
    depth: float | Sequence[float] = DEPTHS,
    margin: float = 6.0,
    distractors: int = 0,
    distractor_gap: float = 1.0,
    background: str = "gaussian",
) -> LayerInputs:
    """Plants one entry for each row whose oracle score is `margin` standard deviations above the row's mean score.

    With Gaussian background 6 is above all others up to a million entries; 1.5 is about the cut of 512 in 5,649. A row
    whose best possible key scores less (there are some with outlier-heavy background) gets REACH of that score.
    `distractors` more entries a row score `distractor_gap` deviations less than the needle: similar facts elsewhere.
    `background` is the family of everything else. The needle's latent answers NEEDLE_HEADS attention heads of its row.
    """
    from .families import apply_family

    inputs = apply_family(background, inputs, draw, {})
    if inputs.index is None:
        return inputs
    entries = needle_entries(inputs, depth)
    rows = (entries >= 0).nonzero()[:, 0]
    if not len(rows):
        return inputs
    query, weight = (part[rows] for part in scorer_queries(inputs))
    mean, deviation = background_level(inputs, draw, rows, query, weight)
    key = key_of_score(query, weight, mean + margin * deviation, low_start(query, weight, draw, "needle.key"))
    _plant(inputs, draw, rows, entries[rows], key)
    level = mean + (margin - distractor_gap) * deviation
    taken = {(int(inputs.row_request[row]), int(entries[row])) for row in rows}
    for number in range(distractors):
        similar = key_of_score(query, weight, level, low_start(query, weight, draw, f"distractor.key/{number}"))
        _plant_distractors(inputs, draw, rows, similar, number, taken)
    return inputs


def background_level(
    inputs: LayerInputs, draw: Draw, rows: Tensor, query: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation [rows] fp64 of each row's scores over a sample of its request's entries."""
    mean = torch.zeros(len(rows), dtype=torch.float64)
    deviation = torch.ones(len(rows), dtype=torch.float64)
    for request, count in enumerate(inputs.entries):
        mine = (inputs.row_request[rows] == request).nonzero()[:, 0]
        if not len(mine) or count < 2:
            continue
        entry = draw.permutation(f"needle.sample/{request}", count - 1)[:SAMPLE] + 1
        key = sampled_keys(inputs, request, entry)
        scores = torch.stack([(query[row] @ key.T).relu_().mul_(weight[row, :, None]).sum(0) for row in mine.tolist()])
        mean[mine], deviation[mine] = scores.mean(1), scores.std(1, correction=0)
    return mean, deviation


def low_start(query: Tensor, weight: Tensor, draw: Draw, name: str) -> Tensor:
    """Unit vectors [R, D] fp64 that score low with their own row: the worst of STARTS random ones."""
    rows, _, dim = query.shape
    starts = normalize(draw.normal(name, STARTS, rows, dim).double(), dim=2)
    worst = torch.stack([row_scores(query, weight, start) for start in starts]).argmin(0)
    return starts[worst, torch.arange(rows)]


def key_of_score(query: Tensor, weight: Tensor, target: Tensor, start: Tensor) -> Tensor:
    """Keys [R, D] fp64 of length sqrt(D) whose unscaled score with their own row is `target` [R].

    Between `start` [R, D], unit vectors that score less, and the direction that the row likes best the blend is
    bisected. A target out of reach becomes REACH of the best possible score.
    """
    rows, _, dim = query.shape
    best = _best_direction(query, weight)
    low, high = torch.zeros(rows, 1, dtype=torch.float64), torch.ones(rows, 1, dtype=torch.float64)

    def blend(share: Tensor) -> Tensor:
        return normalize(share * best + (1 - share) * start, dim=1).mul(dim**0.5)

    target = torch.minimum(target, REACH * row_scores(query, weight, blend(high)))
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        enough = (row_scores(query, weight, blend(middle)) >= target)[:, None]
        low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
    return blend(high)


def _best_direction(query: Tensor, weight: Tensor) -> Tensor:
    """Unit vectors [R, D] with about the largest score of their row: ascent from the sum of its positive heads."""
    direction = normalize((weight.clamp(min=0)[..., None] * query).sum(1), dim=1)
    best, best_score = direction, row_scores(query, weight, direction)
    for _ in range(ASCENTS):
        active = weight * (torch.einsum("rhd,rd->rh", query, direction) > 0)
        direction = normalize(direction + normalize(torch.einsum("rh,rhd->rd", active, query), dim=1), dim=1)
        reached = row_scores(query, weight, direction)
        best = torch.where((reached > best_score)[:, None], direction, best)
        best_score = torch.maximum(reached, best_score)
    return best


def _plant(inputs: LayerInputs, draw: Draw, rows: Tensor, entry: Tensor, key: Tensor) -> None:
    """Writes needle keys, and latents that answer the first NEEDLE_HEADS attention heads of their rows."""
    width = inputs.config.head_dim
    query = inputs.attn_query[rows, :NEEDLE_HEADS].double()
    table = rope_table(inputs.config, inputs.kind, inputs.row_position[rows])
    latent = normalize(rotate(normalize(query, dim=-1), table).sum(1), dim=1) * width**0.5
    for request in torch.unique(inputs.row_request[rows]).tolist():
        mine = inputs.row_request[rows] == request
        plant_pooled(inputs, "index", request, entry[mine], pooled_for_key(inputs, key[mine], entry[mine]))
        plant_pooled(inputs, "main", request, entry[mine], pooled_for_latent(inputs, latent[mine], entry[mine]))


def _plant_distractors(
    inputs: LayerInputs, draw: Draw, rows: Tensor, key: Tensor, number: int, taken: set[tuple[int, int]]
) -> None:
    """Writes one similar key a row at a random free entry that the row sees; a row without a free one gets none."""
    for place, row in enumerate(rows.tolist()):
        request, visible = int(inputs.row_request[row]), int(inputs.visible[row])
        for entry in draw.permutation(f"distractor.entry/{number}/{row}", visible).tolist():
            if (request, entry) not in taken:
                taken.add((request, entry))
                spot = torch.tensor([entry])
                plant_pooled(inputs, "index", request, spot, pooled_for_key(inputs, key[place : place + 1], spot))
                break
