"""Field reports about scores, rotation and the paged cache: L1, N1, N2, N3, S1, S4."""

import torch
from torch import Tensor

from ..reference import indexer
from ..reference.config import LayerKind, load_config
from ..reference.rope import frequencies, rope_table, rotate
from .field_report import FORMAT_SLACK, Component, Fault, FieldReport, Violation, draw, wrong_rows

CONFIG = load_config("v4-flash")
RATIO = 4
DIM = CONFIG.index_head_dim

# ---------------------------------------------------------------------------------------------- L1: ReLU and weight

SCORE_SLACK = 2.0**-6
"""Error of a score over sum(abs(terms)). The loosest declared arithmetic rounds each product, weighted term and sum to
bf16: three roundings of at most 2^-8. The 14-bit accumulator of an fp8 tensor core is finer."""


def _check_score(score: Component) -> list[Violation]:
    query = draw("l1").normal("query", 4, CONFIG.index_n_heads, DIM, dtype=torch.bfloat16).float()
    key = draw("l1").normal("key", 4096, DIM, dtype=torch.bfloat16).float()
    weight = draw("l1").normal("weight", 4, CONFIG.index_n_heads)
    got = score(query, key, weight)
    want = indexer.score(query, key, weight)
    if got.shape != want.shape:
        return [Violation("score", f"shape is {tuple(got.shape)}, must be {tuple(want.shape)}")]
    error = (got.double() - want).abs() / indexer.score_magnitude(query, key, weight)
    worst = float(error.nan_to_num(nan=torch.inf).max())
    if worst <= SCORE_SLACK:
        return []
    k = CONFIG.index_topk
    same = sum(len(set(a) & set(b)) for a, b in zip(*(_best(part, k) for part in (got, want)), strict=True))
    text = f"off by {worst:.3g} of sum(abs(terms)), at most {SCORE_SLACK:.3g}; overlap of the top {k}: "
    return [Violation("score", text + f"{same / (k * len(got)):.3f}")]


def _best(score: Tensor, k: int) -> list[list[int]]:
    best: list[list[int]] = score.topk(k, dim=1).indices.tolist()
    return best


def _products(query: Tensor, key: Tensor) -> Tensor:
    return torch.einsum("rhd,ed->rhe", query.double(), key.double())


def _no_relu(query: Tensor, key: Tensor, weight: Tensor) -> Tensor:
    return (_products(query, key) * weight[..., None]).sum(1)


def _weight_first(query: Tensor, key: Tensor, weight: Tensor) -> Tensor:
    return (_products(query, key) * weight[..., None]).relu().sum(1)


def _mean(query: Tensor, key: Tensor, weight: Tensor) -> Tensor:
    return (_products(query, key).relu() * weight[..., None]).mean(1)


# ---------------------------------------------------------------------------------------------- N1, N2: rotation

ROTATION_SLACK = 2.0**-7
"""Relative error of a rotated row: rounded to bf16 before and after, by at most 2^-8 each."""


def _exact_rotation(x: Tensor, position: Tensor, kind: LayerKind) -> Tensor:
    return rotate(x, rope_table(CONFIG, kind, position))


def _check_pairs(rotation: Component) -> list[Violation]:
    position = torch.tensor([0, 1, 3, 127]).repeat_interleave(8)
    x = draw("n1").normal("rows", 8, DIM).repeat(4, 1)
    labels = [f"position {place}" for place in position.tolist()]
    return wrong_rows(
        "pairs", rotation(x, position, "csa"), _exact_rotation(x, position, "csa"), ROTATION_SLACK, labels
    )


def _half_split(x: Tensor, position: Tensor, kind: LayerKind) -> Tensor:
    """Pairs (i, i + 32) instead of (2i, 2i + 1)."""
    rope = CONFIG.qk_rope_head_dim
    order = torch.arange(rope).view(2, -1).T.flatten()
    tail = _exact_rotation(x[:, -rope:][:, order], position, kind)
    return torch.cat((x[:, :-rope].double(), tail[:, order.argsort()]), 1)


def _check_base(rotation: Component) -> list[Violation]:
    places = (0, 1, 64, 1024, 8192, 65535, 65536, 200000)
    position = torch.tensor(places)
    x = draw("n2").normal("row", 1, DIM).repeat(len(places), 1)
    found = []
    kinds: tuple[LayerKind, ...] = ("swa", "csa", "hca")
    for kind in kinds:
        labels = [f"{kind} layer, position {place}" for place in places]
        want = _exact_rotation(x, position, kind)
        found += wrong_rows("table of the layer kind", rotation(x, position, kind), want, ROTATION_SLACK, labels)
    return found


def _one_base(x: Tensor, position: Tensor, kind: LayerKind) -> Tensor:
    """Every layer rotates with the plain base of window-only layers."""
    return _exact_rotation(x, position, "swa")


def _yarn_everywhere(x: Tensor, position: Tensor, kind: LayerKind) -> Tensor:
    """Window-only layers get the compressed layers' base and YaRN."""
    return _exact_rotation(x, position, "csa")


def _no_yarn(x: Tensor, position: Tensor, kind: LayerKind) -> Tensor:
    """The compressed layers' base without YaRN."""
    if kind == "swa":
        return _exact_rotation(x, position, kind)
    pairs = torch.arange(len(frequencies(CONFIG, kind)), dtype=torch.float64) / len(frequencies(CONFIG, kind))
    angle = position[:, None] * CONFIG.compress_rope_theta**-pairs
    return rotate(x, torch.polar(torch.ones_like(angle), angle))


# ---------------------------------------------------------------------------------------------- N3: entry position


def _key_at(pooled: Tensor, norm_weight: Tensor, position: Tensor) -> Tensor:
    return indexer.index_key(pooled, norm_weight, CONFIG.rms_norm_eps, rope_table(CONFIG, "csa", position))


def _exact_key(pooled: Tensor, norm_weight: Tensor, entry: Tensor) -> Tensor:
    return _key_at(pooled, norm_weight, RATIO * entry)


def _check_entry_position(index_key: Component) -> list[Violation]:
    entry = torch.tensor([0, 1, 8, 256])
    pooled = draw("n3").normal("pooled", len(entry), DIM)
    pooled[:, : DIM - CONFIG.qk_rope_head_dim] *= 0.1  # most of a key's length is rotated, so a wrong angle stands out
    norm_weight = 1 + 0.1 * draw("n3").normal("norm_weight", DIM)
    want = _exact_key(pooled, norm_weight, entry)
    labels = [f"entry {number}" for number in entry.tolist()]
    return wrong_rows("position 4e", index_key(pooled, norm_weight, entry), want, FORMAT_SLACK, labels)


def _entry_as_position(pooled: Tensor, norm_weight: Tensor, entry: Tensor) -> Tensor:
    return _key_at(pooled, norm_weight, entry)


def _last_token(pooled: Tensor, norm_weight: Tensor, entry: Tensor) -> Tensor:
    return _key_at(pooled, norm_weight, RATIO * entry + RATIO - 1)


def _not_rotated(pooled: Tensor, norm_weight: Tensor, entry: Tensor) -> Tensor:
    return _key_at(pooled, norm_weight, torch.zeros_like(entry))


# ---------------------------------------------------------------------------------------------- S1: layout

PAGE = 64
TILE = 16
STRIDE = 37
"""Odd, so that multiplying by it modulo a power of two shuffles entry and channel numbers."""


def _check_layout(store_and_read: Component) -> list[Violation]:
    one_page = torch.arange(PAGE)
    by_entry = (one_page * STRIDE % PAGE + 1.0)[:, None].repeat(1, DIM)
    by_channel = (torch.arange(DIM) * STRIDE % DIM + 1.0).repeat(PAGE, 1)
    shuffled = draw("s1").permutation("slots", 3 * PAGE)[: 2 * PAGE]
    found = []
    for label, key, slot, pages in (
        ("value = entry number", by_entry, one_page, 1),
        ("value = channel number", by_channel, one_page, 1),
        ("random values, shuffled slots of 3 pages", draw("s1").normal("key", 2 * PAGE, DIM), shuffled, 3),
    ):
        labels = [f"{label}, slot {number}" for number in slot.tolist()]
        found += wrong_rows("read back", store_and_read(key, slot, pages), key, FORMAT_SLACK, labels)
    return found


def _flat(key: Tensor, slot: Tensor, pages: int) -> Tensor:
    pool = torch.zeros(pages * PAGE, DIM)
    pool[slot] = key
    return pool[slot]


def _tiled_reader(key: Tensor, slot: Tensor, pages: int) -> Tensor:
    """Written row by row, read in tiles of 16 x 16."""
    pool = torch.zeros(pages * PAGE, DIM)
    pool[slot] = key
    tiles = pool.view(pages, PAGE // TILE, DIM // TILE, TILE, TILE)
    return tiles.transpose(2, 3).reshape(pages * PAGE, DIM)[slot]


# ---------------------------------------------------------------------------------------------- S4: offsets

PAGES = (0, 1, 131_071, 131_072, 254_200, 254_201, 262_144)
PAGE_BYTES = (8_448, 16_384, 1 << 21)
"""The fp8 page, the bf16 page (byte offsets pass 2^31 from page 131,072 on), and a pool with a large page stride."""


def _check_offsets(page_offset: Component) -> list[Violation]:
    page = torch.tensor(PAGES, dtype=torch.int32)
    found = []
    for size in PAGE_BYTES:
        got = page_offset(page, size).tolist()
        found += [
            Violation("64-bit offset", f"page {number} of {size} bytes: offset {value}, must be {number * size}")
            for number, value in zip(PAGES, got, strict=True)
            if value != number * size
        ]
    return found


def _wide(page: Tensor, size: int) -> Tensor:
    return page.long() * size


def _narrow(page: Tensor, size: int) -> Tensor:
    """The product is made in 32 bits, which wraps."""
    wrapped = (page.long() * size) & 0xFFFFFFFF
    return torch.where(wrapped >= 1 << 31, wrapped - (1 << 32), wrapped)


# ---------------------------------------------------------------------------------------------- the reports

_SGLANG = "https://github.com/sgl-project/sglang/"
_MLX = "https://github.com/ml-explore/mlx-lm/"

KEY_REPORTS = (
    FieldReport(
        id="l1-relu-and-weight",
        code="L1",
        stage="score",
        kind="score",
        urls=(f"{_MLX}pull/1189", f"{_SGLANG}pull/33271"),
        says="ReLU dropped or applied after the weight, or the mean of heads instead of the sum",
        contract="score = sum over heads of weight * relu(q . k); weights may be negative (K5)",
        check=_check_score,
        reference=indexer.score,
        faults=(
            Fault("no ReLU", "score", _no_relu),
            Fault("weight before ReLU", "score", _weight_first),
            Fault("mean of heads", "score", _mean),
        ),
    ),
    FieldReport(
        id="n1-pairs",
        code="N1",
        stage="index_k",
        kind="rotate",
        urls=(f"{_SGLANG}pull/13495", f"{_SGLANG}pull/30342"),
        says="half-split pairs where interleaved ones are meant; invisible at position 0",
        contract="pairs (2i, 2i + 1) of the last 64 dims (K4)",
        check=_check_pairs,
        reference=_exact_rotation,
        faults=(Fault("half-split pairs", "pairs", _half_split),),
    ),
    FieldReport(
        id="n2-base-by-layer-kind",
        code="N2",
        stage="index_k",
        kind="rotate",
        urls=(f"{_SGLANG}pull/34788", "https://github.com/huggingface/transformers/issues/45910"),
        says="one base for all layers, or YaRN on the wrong ones; clean within about 128 tokens",
        contract="window-only layers: base 10,000, no YaRN; compressed ones: base 160,000 with YaRN, one table for all",
        check=_check_base,
        reference=_exact_rotation,
        faults=(
            Fault("base 10,000 everywhere", "table of the layer kind", _one_base),
            Fault("YaRN on window-only layers", "table of the layer kind", _yarn_everywhere),
            Fault("no YaRN", "table of the layer kind", _no_yarn),
        ),
    ),
    FieldReport(
        id="n3-entry-position",
        code="N3",
        stage="index_k",
        kind="index_key",
        urls=("https://github.com/AMD-AGI/Primus/pull/928", f"{_MLX}pull/1189"),
        says="entries rotated at their number, at their last token, or not at all; fine inside the window",
        contract="entry e is rotated at position 4e, its first token (K4)",
        check=_check_entry_position,
        reference=_exact_key,
        faults=(
            Fault("entry number as position", "position 4e", _entry_as_position),
            Fault("position of the last token", "position 4e", _last_token),
            Fault("not rotated", "position 4e", _not_rotated),
        ),
    ),
    FieldReport(
        id="s1-flat-and-tiled",
        code="S1",
        stage="index_k",
        kind="store_and_read",
        urls=("https://github.com/vllm-project/vllm/issues/52109", "https://github.com/ROCm/aiter/pull/5591"),
        says="flat writer, tile-shuffled reader: needles found at 3,611 tokens, lost at 5,294",
        contract="a slot reads back what was written to it",
        check=_check_layout,
        reference=_flat,
        faults=(Fault("16 x 16 tiles read", "read back", _tiled_reader),),
    ),
    FieldReport(
        id="s4-page-offset",
        code="S4",
        stage="index_k",
        kind="page_offset",
        urls=(f"{_SGLANG}pull/34725", "https://github.com/vllm-project/vllm/pull/46222"),
        says="32-bit page offsets: a wrong page is read from page 131,072 (bf16) or 254,201 (fp8) on",
        contract="page * bytes in 64 bits",
        check=_check_offsets,
        reference=_wide,
        faults=(Fault("32-bit product", "64-bit offset", _narrow),),
    ),
)
