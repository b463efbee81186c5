"""Plants the needles of a sweep world: the key that the indexer has to find, and the latent that attention reads."""

import torch
from torch import Tensor
from torch.nn.functional import normalize

from ..cases.draw import Draw
from ..cases.needle import NEEDLE_HEADS, background_level, key_of_score, low_start
from ..cases.planting import plant_pooled, pooled_for_key, sampled_keys, scorer_queries
from ..certify import epsilon
from ..paths.oracle import Oracle
from ..paths.sglang_fp8_model import SGLANG_FP8
from ..reference.inputs import LayerInputs
from ..reference.rope import rope_table, rotate
from ..trace import Trace

MARGIN = 6.0
"""Standard deviations above the mean score: above every Gaussian distractor up to a million entries."""
CLOSE_MARGINS = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4)
"""Adversarial margins in units of fp8's error bound, one a row in turn. The bound is for one failure in 10^12 over a
million entries, about twelve standard deviations of the difference of two scores, so losses are expected up to 1/4."""
COPIES = 65
"""Copies of the text whose mean key a near-duplicate needle starts from."""


def plant_keys(inputs: LayerInputs, draw: Draw, entry: Tensor, distractor: str) -> None:
    """Gives the needle `entry` [R] of every row its key, in place."""
    query, weight = scorer_queries(inputs)
    rows = torch.arange(len(entry))
    if distractor == "adversarial":
        target = _just_above_the_cut(inputs, int(draw.integers("needle.margin", 0, len(CLOSE_MARGINS), 1)))
    else:
        mean, deviation = background_level(inputs, draw, rows, query, weight)
        target = mean + MARGIN * deviation
    if distractor == "near-duplicate":
        copies = sampled_keys(inputs, 0, torch.arange(1, min(inputs.entries[0], COPIES)))
        # Norm weights give keys of one direction one length, which is not exactly the sqrt(D) of `key_of_score`.
        target = target * copies.shape[1] ** 0.5 / copies.norm(dim=1).mean()
        start = normalize(copies.mean(0), dim=0).expand(len(entry), -1)
    else:
        start = low_start(query, weight, draw, "needle.key")
    key = key_of_score(query, weight, target, start)
    plant_pooled(inputs, "index", 0, entry, pooled_for_key(inputs, key, entry))


def _just_above_the_cut(inputs: LayerInputs, first: int) -> Tensor:
    """Unscaled target scores [R]: the k-th best score of the row plus a CLOSE_MARGIN of fp8's bound there.

    Rows take the margins in turn from number `first` on, so that over worlds every length and depth gets every margin.

    A row that sees at most k entries has no cut; the lowest score it sees stands for it.
    """
    trace = Trace("sweep", inputs.layer, Oracle.name)
    for stage in ("compressed", "index_k", "index_q", "head_weight", "score"):
        trace.stages[stage] = Oracle().stage(stage, inputs, trace)
    score, k = trace.value("score").double(), inputs.config.index_topk
    seen = zip(score, inputs.visible.tolist(), strict=True)
    cut = torch.stack([row[:visible].topk(min(k, visible)).indices[-1:] for row, visible in seen])
    rows = torch.arange(len(score))
    width = 2 * epsilon(inputs, rows, cut, trace, SGLANG_FP8).total
    margin = torch.tensor(CLOSE_MARGINS, dtype=torch.float64)[(rows + first) % len(CLOSE_MARGINS), None]
    return (score.gather(1, cut) + margin * width)[:, 0] / inputs.config.index_scale


def plant_latents(inputs: LayerInputs, entry: Tensor, latents: Tensor) -> None:
    """Gives every needle a latent that answers the first NEEDLE_HEADS attention heads of its row; latents [E, C]."""
    query = inputs.attn_query[:, :NEEDLE_HEADS].double()
    table = rope_table(inputs.config, inputs.kind, inputs.row_position)
    answer = normalize(rotate(normalize(query, dim=-1), table).sum(1), dim=1) * latents.shape[1] ** 0.5
    latents[entry] = answer.float()
