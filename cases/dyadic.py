"""The dyadic family: inputs on which every path, whatever its formats, must agree bit for bit.

What makes each step exact
* Pooling: all gates of an entry are equal once the bias is added, so softmax weighs its 4, 8 or 128 slots by a power of
  two, and the slots' values average to the wanted one exactly.
* RMSNorm: the mean square is 4^MAGNITUDE, so large that eps vanishes even in fp64, and its root is a power of two.
* RoPE: cosines are not dyadic, so the rotated dims are 0. This family cannot see a RoPE fault.
* Hadamard: the factor 128^-1/2 = 2^-3.5 is irrational. For keys, the norm weight carries a factor sqrt(2) rounded to
  fp32: fp32(sqrt 2) * 2^-3.5 differs from 1/8 by 1.7e-8, less than half an fp32 step. Signs are (-1)^(quadratic form of
  the dim's bits) over half of the unrotated dims, so every partial sum of every butterfly is 0 or a power of two times
  the one magnitude, and each nonzero key element is a power of two once rounded to bf16, e2m1 or e4m3 with a
  power-of-two scale. e4m3 with a raw fp32 scale has codes 0 and +-448 exactly, and a scale one fp32 step below.
  Queries have no norm weight. Their elements are +-181/128, within 1.1e-4 of sqrt(2): bf16 and e2m1 round each
  transformed element to a power of two, and where nothing rounds it that far all elements share one factor of 0.99989.
* Score: for each row and entry at most one head has a positive product, so no sum is ever rounded. A score is a small
  integer times one factor per path, up to the path's rounding of that product.
* Attention: in each head two keys tie for the largest product and the others trail by over 745, so that exp gives
  exactly 0 even in fp64: the output is the mean of two latents. The sink vanishes too.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from ..reference.compressor import OVERLAP_RATIO, Which, compressor_inputs
from ..reference.config import ModelConfig
from ..reference.inputs import LayerInputs
from .draw import Draw
from .planting import entry_tokens

MAGNITUDE = 20
"""Inputs of every norm have root mean square 2^20: the fp64 step of its square 2^40 is 2^-12, and eps is 1e-6."""

BIAS_STEP = 8
"""Gates and biases are multiples of 1/8 below 16, so that their sum is exact even in bf16."""

KEY_LEVELS = ((4.0, 4), (2.0, 12), (1.0, 16))
"""(size, dims) of a key before the norm, on 32 dims; the squares sum to 128, the mean square over 128 dims is 1."""

LATENT_LEVELS = ((2.0, 60), (1.0, 234), (0.5, 152), (0.0, 2))
"""(size, dims) of a latent before the norm, on 448 dims; the squares sum to 512."""

LATENT_WEIGHTS = (128.0, 256.0)
"""Norm weights of latents: so large that a head's two best keys lead by over 745, where exp underflows in fp64."""

QUERY_LEVELS = ((2.0, 64), (1.0, 256), (0.0, 128))
"""(size, dims) of an attention query, on 448 dims; the squares sum to 512. A pair differs on the dims of size 0."""

QUERY_SIZE = 181 / 128
"""The bf16 number nearest to sqrt(2)."""

CLASSES = 32
GOOD_CLASSES = 8
"""Keys have 32 orthogonal sign patterns. The first 2 k entries of a request hold k / 4 of each of the first eight, and
a row weighs four of these above everything else: those k entries are its selection."""

BEST_WEIGHTS = (8.0, 10.0, 12.0, 14.0)
OTHER_WEIGHTS = (-6.0, -3.0, -1.0, 1.0, 2.0, 3.0, 4.0)
GROUPS = 4
"""Groups of attention heads of a row; each group has its own pair of best keys."""

EXACT_STAGES = {
    "compressed": "equal gates and slots that average exactly",
    "index_k": "powers of two in every format (e4m3 with a raw scale: the codes)",
    "topk": "best scores at least twice the others; for rows that see at most k or at least 2 k entries",
    "kv": "powers of two in every format",
    "attention": "mean of two latents: the output, to bf16 where splits are merged by log-sum-exp; not the lse",
}
"""Stages whose tensors are equal bit for bit, as fp32, on every path, and why. `head_weight` joins them when
D^-1/2 H^-1/2 is a power of two (32 heads of 128). `index_q` and `score` are exact up to one factor per path."""


def exact_stages(config: ModelConfig) -> dict[str, str]:
    """Zero-tolerance stages of a dyadic case for `config`, with the reason of each."""
    product = config.index_head_dim * config.index_n_heads
    square = product.bit_length() % 2 == 1 and product & (product - 1) == 0
    return EXACT_STAGES | ({"head_weight": "integers times a power of two"} if square else {})


def dyadic(inputs: LayerInputs, draw: Draw) -> LayerInputs:
    """Inputs that every step of every path computes without rounding, as the module explains.

    ValueError for head dims other than DeepSeek-V4's (128 and 512 with 64 rotated), or index heads other than 32 or 64.
    """
    config = inputs.config
    if (config.index_head_dim, config.head_dim, config.qk_rope_head_dim) != (128, 512, 64):
        raise ValueError("the dyadic family is made for head dims 128 and 512 with 64 rotated; choose another family")
    if config.index_n_heads not in (CLASSES, 2 * CLASSES):
        raise ValueError(f"the dyadic family is made for 32 or 64 index heads, not {config.index_n_heads}; change it")
    if inputs.kind == "csa":
        inputs, wanted = _index(inputs, draw)
    elif inputs.kind == "hca":
        wanted = [torch.arange(count) for count in inputs.visible.tolist()]
    else:
        wanted = [torch.arange(0)] * len(inputs.row_request)
    return _attention(inputs, draw, wanted)


def _levels(table: tuple[tuple[float, int], ...], order: Tensor) -> Tensor:
    """The sizes of `table` ((size, dims), ...), fp32, in the given order of dims."""
    return torch.cat([torch.full((dims,), size) for size, dims in table])[order]


def _exact_tokens(inputs: LayerInputs, which: Which, pooled: Tensor, draw: Draw) -> LayerInputs:
    """`inputs` whose tokens pool to `pooled` [E, D] exactly, each slot with its own value and its own gate.

    Slots of a half deviate from the wanted value by +a, -a, +b, -b, ... in random order; the gates of an entry and dim
    are one number less the slot's bias. Tokens that no complete entry reads keep their Gaussian values.
    """
    old = compressor_inputs(inputs, which)
    ratio, dim = inputs.ratio, pooled.shape[1]
    halves = 2 if ratio == OVERLAP_RATIO else 1
    ape = (old.ape * BIAS_STEP).round() / BIAS_STEP
    sign = torch.tensor([1.0, -1.0]).repeat(ratio // 2)
    for request, count in enumerate(inputs.entries):
        given, first = inputs.prefix_entries[request], inputs.entry_offset[request]
        start = sum(inputs.prefix_entries[:request])
        old.pooled_prefix[start : start + given] = pooled[first : first + given]
        entry = torch.arange(given, count)
        gate = draw.integers(f"{which}.gate/{request}", -2 * BIAS_STEP, 2 * BIAS_STEP, count, 1, dim) / BIAS_STEP
        for half in range(halves):
            before = halves - 1 - half  # blocks back: the overlap half of entry e is in block e - 1
            reads = entry[entry >= before]
            name = f"{which}.slots/{request}/{half}"
            step = draw.integers(name, -3, 4, len(reads), ratio // 2, dim).float() * 2.0**MAGNITUDE
            apart = (step.repeat_interleave(2, 1) * sign[:, None])[:, draw.permutation(f"{name}/order", ratio)]
            token = entry_tokens(inputs, request, reads) - before * ratio
            old.kv_score[token, half * dim : (half + 1) * dim] = pooled[first + reads, None] + apart
            column = slice((halves + half) * dim, (halves + half + 1) * dim)
            old.kv_score[token, column] = gate[reads] - ape[half * ratio : (half + 1) * ratio]
    changed = replace(old, ape=ape)
    return replace(inputs, index=changed) if which == "index" else replace(inputs, main=changed)


def _bits(number: Tensor, count: int) -> Tensor:
    """Binary digits of `number` [n] int64, [n, count], lowest first."""
    return (number[:, None] >> torch.arange(count)) & 1


def _index(inputs: LayerInputs, draw: Draw) -> tuple[LayerInputs, list[Tensor]]:
    """The indexer's inputs, and for each row the visible entries that carry its best four classes."""
    config = inputs.config
    plain = config.index_head_dim - config.qk_rope_head_dim
    digits = plain.bit_length() - 1
    bits = _bits(torch.arange(plain), digits)
    form = draw.integers("form", 0, 2, digits, digits).triu(1)
    mask = draw.integers("mask", 1, plain, 1)
    side = (bits @ _bits(mask, digits)[0]) % 2
    pivot = int((mask & -mask).item())
    number = torch.arange(plain)
    linear = number[(number & pivot) == 0][draw.permutation("classes", CLASSES)]
    quadratic = ((bits @ form) * bits).sum(1)
    pattern = 1.0 - 2.0 * ((quadratic + _bits(linear, digits) @ bits.T) % 2)  # [CLASSES, plain]

    size = torch.zeros(plain)
    for part in range(2):
        size[side == part] = _levels(KEY_LEVELS, draw.permutation(f"sizes/{part}", CLASSES))
    assert inputs.index is not None
    norm_weight = 2.0 ** draw.integers("index.norm", -1, 2, config.index_head_dim)
    norm_weight[:plain] = math.sqrt(2.0) / size
    kinds, polarity = _entry_classes(inputs, draw)
    on_side = side == draw.integers("sides", 0, 2, len(kinds), 1)
    pooled = torch.zeros(len(kinds), config.index_head_dim)
    pooled[:, :plain] = pattern[kinds] * polarity[:, None] * size * on_side * 2.0**MAGNITUDE
    inputs = replace(inputs, index=replace(inputs.index, norm_weight=norm_weight.float()))
    best = _queries(inputs, draw, pattern)
    wanted = []
    for row, request in enumerate(inputs.row_request.tolist()):
        first = inputs.entry_offset[request]
        seen = kinds[first : first + int(inputs.visible[row])]
        seen = seen[: 2 * config.index_topk]
        wanted.append(torch.isin(seen, best[row]).nonzero()[:, 0])
    return _exact_tokens(inputs, "index", pooled, draw), wanted


def _entry_classes(inputs: LayerInputs, draw: Draw) -> tuple[Tensor, Tensor]:
    """Class [E] int64 and polarity [E] (+1, -1) of every entry: good ones first, as GOOD_CLASSES explains."""
    good = 2 * inputs.config.index_topk
    kinds, polarity = [], []
    for request, count in enumerate(inputs.entries):
        kind = draw.integers(f"class/{request}", GOOD_CLASSES, CLASSES, count)
        sign = draw.signs(f"polarity/{request}", count)
        kind[:good] = (draw.permutation(f"good/{request}", good) % GOOD_CLASSES)[:count]
        sign[:good] = 1.0
        kinds.append(kind)
        polarity.append(sign)
    return torch.cat(kinds), torch.cat(polarity)


def _queries(inputs: LayerInputs, draw: Draw, pattern: Tensor) -> Tensor:
    """Writes queries and head weights; returns each row's best classes [R, 4].

    Each class has one head, and with 64 heads another one for its negative, in an order of the row's own.
    """
    query, weight = inputs.index_query, inputs.index_weight
    assert query is not None and weight is not None
    rows, heads, _ = query.shape
    other = torch.tensor(OTHER_WEIGHTS)
    weight.copy_(other[draw.integers("weights", 0, len(other), rows, heads)])
    query.zero_()
    best = torch.empty(rows, len(BEST_WEIGHTS), dtype=torch.int64)
    for row in range(rows):
        head = draw.permutation(f"heads/{row}", heads)
        both = torch.cat((pattern, -pattern))[:heads] * QUERY_SIZE
        query[row, head, : pattern.shape[1]] = both.to(query.dtype)
        best[row] = draw.permutation(f"best/{row}", GOOD_CLASSES)[: len(BEST_WEIGHTS)]
        weight[row, head[best[row]]] = torch.tensor(BEST_WEIGHTS, dtype=weight.dtype)
    return best


def _attention(inputs: LayerInputs, draw: Draw, wanted: list[Tensor]) -> LayerInputs:
    """Latents and attention queries; each group of heads of a row gets a window token and a wanted entry as a pair."""
    config = inputs.config
    plain = config.head_dim - config.qk_rope_head_dim
    asks = _levels(QUERY_LEVELS, draw.permutation("query.sizes", plain))
    size = _levels(LATENT_LEVELS, draw.permutation("latent.sizes", plain))
    weights = torch.tensor(LATENT_WEIGHTS)[draw.integers("latent.weights", 0, len(LATENT_WEIGHTS), 2, config.head_dim)]
    silent = (asks == 0).nonzero()[:, 0]
    entry_size = size.clone()
    entry_size[silent] = size[silent][draw.permutation("entry.sizes", len(silent))]
    entry_weight = weights[0].clone()
    entry_weight[silent] = weights[1][silent]
    near = draw.signs("window.signs", len(inputs.window_kv), plain)
    far = draw.signs("entry.signs", inputs.entry_offset[-1], plain)
    inputs.attn_query.zero_()
    for row, group, token, entry in _pairs(inputs, draw, wanted):
        if entry >= 0:
            far[entry, asks > 0] = near[token, asks > 0]
        inputs.attn_query[row, group::GROUPS, :plain] = (near[token] * asks * 2.0**MAGNITUDE).to(torch.bfloat16)
    inputs.window_kv.zero_()
    inputs.window_kv[:, :plain] = (near * size * 2.0**MAGNITUDE).to(torch.bfloat16)
    inputs = replace(inputs, kv_norm_weight=weights[0])
    if inputs.main is None:
        return inputs
    pooled = torch.zeros(len(far), config.head_dim)
    pooled[:, :plain] = far * entry_size * 2.0**MAGNITUDE
    inputs = replace(inputs, main=replace(inputs.main, norm_weight=entry_weight))
    return _exact_tokens(inputs, "main", pooled, draw)


def _pairs(inputs: LayerInputs, draw: Draw, wanted: list[Tensor]) -> list[tuple[int, int, int, int]]:
    """(row, group of heads, window token, packed entry or -1); no entry and, with an entry, no token in two pairs."""
    pairs, used_tokens, used_entries = [], set[int](), set[int]()
    for row, request in enumerate(inputs.row_request.tolist()):
        window = inputs.window_index[row]
        covered = window[window >= 0]
        tokens: list[int] = covered[draw.permutation(f"pair.tokens/{row}", len(covered))].tolist()
        packed = wanted[row] + inputs.entry_offset[request]
        entries: list[int] = packed[draw.permutation(f"pair.entries/{row}", len(packed))].tolist()
        for group in range(GROUPS):
            token = next((token for token in tokens if token not in used_tokens), tokens[0])
            entry = -1 if token in used_tokens else next((entry for entry in entries if entry not in used_entries), -1)
            used_tokens.add(token)
            used_entries.add(entry)
            pairs.append((row, group, token, entry))
    return pairs
