"""Families: how a case shapes the tensors of a layer. One function each, from plain Gaussian inputs to shaped ones.

A family gets fresh inputs, which it may change in place, the case's random streams and its parameters. Parameters and
their defaults are keyword arguments, so an unknown one is refused by name.
"""

import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor

from ..reference.inputs import LayerInputs
from .draw import Draw
from .dyadic import dyadic
from .needle import needle
from .planting import plant_pooled, pooled_for_key, query_for

Family = Callable[..., LayerInputs]
"""family(inputs, draw, **params) -> inputs."""

AIM = 0.8
"""Cosine between an aimed query and the direction that keys are placed along: q.k is then about AIM^2 D = 82 against a
spread of about 9 for D = 128, so signs survive every storage format by nine standard deviations."""

NEGATIVE_HEADS = 4
"""One in this many heads has a negative weight where a family needs the weights of a row to have a positive sum."""


def gaussian(inputs: LayerInputs, draw: Draw) -> LayerInputs:
    """Independent unit normals everywhere: the hard case for a quantised selection, having no heavy tail."""
    return inputs


def outlier_heavy(inputs: LayerInputs, draw: Draw, *, channels: int = 4, factor: float = 24.0) -> LayerInputs:
    """A few channels of keys, queries and latents are `factor` times as large as the rest, as trained models have them.

    What the Hadamard transform is for: without it a per-row scale follows the outliers and the rest loses its bits.
    """
    for which, compressor in (("index", inputs.index), ("main", inputs.main)):
        if compressor is not None:
            width = compressor.ape.shape[-1]
            chosen = draw.permutation(f"outlier.{which}", width)[:channels]
            for half in range(compressor.kv_score.shape[-1] // (2 * width)):
                compressor.kv_score[:, chosen + half * width] *= factor
            compressor.pooled_prefix[:, chosen] *= factor
            if which == "main":
                inputs.window_kv[:, chosen] *= factor
    if inputs.index_query is not None:
        width = inputs.index_query.shape[-1]
        inputs.index_query[..., draw.permutation("outlier.query", width)[:channels]] *= factor
    return inputs


def heavy_tailed(inputs: LayerInputs, draw: Draw, *, degrees: int = 3) -> LayerInputs:
    """Student-t values instead of normal ones in kv, gates, queries and head weights: few of them dominate a sum."""
    for which, compressor in (("index", inputs.index), ("main", inputs.main)):
        if compressor is not None:
            compressor.kv_score.copy_(draw.student(f"{which}.kv_score", degrees, *compressor.kv_score.shape))
    for name, tensor in (("index_query", inputs.index_query), ("index_weight", inputs.index_weight)):
        if tensor is not None:
            tensor.copy_(draw.student(name, degrees, *tensor.shape))
    inputs.window_kv.copy_(draw.student("window_kv", degrees, *inputs.window_kv.shape))
    inputs.attn_query.copy_(draw.student("attn_query", degrees, *inputs.attn_query.shape))
    return inputs


def near_duplicate(inputs: LayerInputs, draw: Draw, *, clusters: int = 8, spread: float = 2.0**-7) -> LayerInputs:
    """Keys come in `clusters` of copies, `spread` apart where the scorer reads them, so the cut falls inside one.

    Repeated text has such keys. A selection among them is decided by differences near a format's step.
    """
    if inputs.index is None:
        return inputs
    _pair_norm_weight(inputs)
    dim = inputs.index.ape.shape[-1]
    centre = draw.normal("duplicate.centre", clusters, dim).double()
    for request, count in enumerate(inputs.entries):
        member = draw.integers(f"duplicate.member/{request}", 0, clusters, count)
        key = centre[member] + spread * draw.normal(f"duplicate.spread/{request}", count, dim).double()
        _plant_keys(inputs, request, key)
    return inputs


def relu_plateau(inputs: LayerInputs, draw: Draw, *, positive: int = 100) -> LayerInputs:
    """Every head's product is negative for all but `positive` entries a request, so all other scores are exactly 0.

    The cut lies on the plateau: a right selection holds every positive entry and any of the zeros, each once.
    """
    if inputs.index is None:
        return inputs
    aim = _aim_queries(inputs, draw)
    for request, count in enumerate(inputs.entries):
        height = torch.full((count,), -AIM, dtype=torch.float64)
        height[draw.permutation(f"plateau.positive/{request}", count)[:positive]] = AIM
        _plant_keys(inputs, request, _along(aim, height, draw, f"plateau/{request}"))
    return inputs


def tie_band(inputs: LayerInputs, draw: Draw, *, spread: float = 0.0, below: float = 0.1) -> LayerInputs:
    """The scores around the cut lie in one band, `spread` wide relative to a key; 0 leaves only fp32's own differences.

    Half of `index_topk` entries a request score clearly above the band, a share `below` of all entries clearly below
    it. Rows that see more than index_topk / (1 - below) entries have their cut inside the band.
    """
    if inputs.index is None:
        return inputs
    _pair_norm_weight(inputs)
    aim = _aim_queries(inputs, draw)
    level = _along(aim, torch.tensor([0.7], dtype=torch.float64), draw, "band.key")
    for request, count in enumerate(inputs.entries):
        order = draw.permutation(f"band.order/{request}", count)
        above, under = order[: inputs.config.index_topk // 2], order[count - int(below * count) :]
        key = level + spread * draw.normal(f"band.spread/{request}", count, len(aim)).double()
        for name, chosen, height in (("above", above, 0.95), ("below", under, 0.3)):
            heights = torch.full((len(chosen),), height, dtype=torch.float64)
            key[chosen] = _along(aim, heights, draw, f"band.{name}/{request}")
        _plant_keys(inputs, request, key)
    return inputs


def cancellation(inputs: LayerInputs, draw: Draw, *, gap: float = 2.0**-4, factor: float = 16.0) -> LayerInputs:
    """Heads come in pairs of nearly equal queries and opposite large weights, so a score is a small difference.

    `gap` is the distance of a pair relative to a query, `factor` the size of the weights: sum(abs(terms)) is about
    1 / gap times the score, and any rounding before the sum shows as much.
    """
    if inputs.index_query is None or inputs.index_weight is None:
        return inputs
    query, weight = inputs.index_query, inputs.index_weight
    half = query.shape[1] // 2
    apart = gap * draw.normal("cancel.gap", *query[:, half : 2 * half].shape)
    query[:, half : 2 * half] = (query[:, :half].float() + apart).to(query.dtype)
    weight[:, :half] *= factor
    weight[:, half : 2 * half] = -weight[:, :half]
    return inputs


def page_edges(inputs: LayerInputs, draw: Draw) -> LayerInputs:
    """The best entries of every row are the first and last of every page and the last one the row sees.

    A reader or writer that loses, shifts or doubles an entry at an edge loses winners, not also-rans.
    """
    if inputs.index is None:
        return inputs
    aim = _aim_queries(inputs, draw)
    visible = inputs.visible
    for request, count in enumerate(inputs.entries):
        entry = torch.arange(count)
        offset = entry % inputs.page_size
        edge = (offset == 0) | (offset == inputs.page_size - 1)
        last = visible[inputs.row_request == request] - 1
        edge[last[last >= 0]] = True
        chosen = entry[edge]
        key = _along(aim, torch.full((len(chosen),), 0.95, dtype=torch.float64), draw, f"edges/{request}")
        plant_pooled(inputs, "index", request, chosen, pooled_for_key(inputs, key, chosen))
    return inputs


def non_finite(
    inputs: LayerInputs, draw: Draw, *, tensor: str = "index_query", value: str = "nan", count: int = 1
) -> LayerInputs:
    """`count` elements of one input tensor (`index_query`, `index.kv_score`, ...) are NaN or infinite: unjudgeable."""
    owner, _, part = tensor.rpartition(".")
    found = getattr(getattr(inputs, owner) if owner else inputs, part, None)
    if not isinstance(found, Tensor) or not found.is_floating_point():
        raise ValueError(f"tensor {tensor!r} is no floating-point input of a {inputs.kind} layer; name one of them")
    found.view(-1)[draw.permutation("non_finite", found.numel())[:count]] = float(value)
    return inputs


def _aim_queries(inputs: LayerInputs, draw: Draw) -> Tensor:
    """Turns every query towards one direction of scorer space, which is returned as a unit vector [D] fp64.

    Head weights become absolute values, every NEGATIVE_HEADS-th negative, so that a score grows with q.k.
    """
    assert inputs.index_query is not None and inputs.index_weight is not None
    rows, heads, dim = inputs.index_query.shape
    aim = torch.nn.functional.normalize(draw.normal("aim", dim).double(), dim=0)
    noise = draw.normal("aim.noise", rows, heads, dim).double()
    query = AIM * dim**0.5 * aim + (1 - AIM**2) ** 0.5 * noise
    inputs.index_query.copy_(query_for(inputs, query))
    weight = inputs.index_weight.abs()
    weight[:, ::NEGATIVE_HEADS] *= -1
    inputs.index_weight.copy_(weight)
    return aim


def _pair_norm_weight(inputs: LayerInputs) -> None:
    """Gives both dims of every rotated pair one norm weight, so that equal keys at different positions keep one length.

    The norm scales a key by 1 / rms(key before rotation / weight), which rotation leaves alone only within such pairs.
    """
    assert inputs.index is not None
    rotated = inputs.index.norm_weight[-inputs.config.qk_rope_head_dim :]
    rotated[1::2] = rotated[::2]


def _along(aim: Tensor, height: Tensor, draw: Draw, name: str) -> Tensor:
    """Keys [n, D] fp64 of length sqrt(D) whose cosine with `aim` is `height` [n], random otherwise."""
    noise = draw.normal(name, len(height), len(aim)).double()
    noise = torch.nn.functional.normalize(noise - (noise @ aim)[:, None] * aim, dim=1)
    return (height[:, None] * aim + (1 - height.square()).sqrt()[:, None] * noise).mul(len(aim) ** 0.5)


def _plant_keys(inputs: LayerInputs, request: int, key: Tensor) -> None:
    """Gives all entries of `request` the scorer-space keys `key` [E of the request, D]."""
    entry = torch.arange(len(key))
    plant_pooled(inputs, "index", request, entry, pooled_for_key(inputs, key, entry))


FAMILIES: dict[str, Family] = {
    "gaussian": gaussian,
    "outlier-heavy": outlier_heavy,
    "heavy-tailed": heavy_tailed,
    "near-duplicate": near_duplicate,
    "relu-plateau": relu_plateau,
    "dyadic": dyadic,
    "tie-band": tie_band,
    "cancellation": cancellation,
    "needle": needle,
    "page-edges": page_edges,
    "non-finite": non_finite,
}


def apply_family(name: str, inputs: LayerInputs, draw: Draw, params: Mapping[str, Any]) -> LayerInputs:
    """`inputs` shaped by family `name`; ValueError with the nearest names, or with the parameters it takes."""
    if name not in FAMILIES:
        close = get_close_matches(name, FAMILIES, n=3, cutoff=0.4) or sorted(FAMILIES)
        raise ValueError(f"unknown family {name!r}: did you mean {', '.join(close)}?")
    takes = [part for part in inspect.signature(FAMILIES[name]).parameters if part not in ("inputs", "draw")]
    unknown = sorted(set(params) - set(takes))
    if unknown:
        raise ValueError(f"family {name} has no parameter {', '.join(unknown)}; it takes {', '.join(takes) or 'none'}")
    return FAMILIES[name](inputs, draw, **params)
