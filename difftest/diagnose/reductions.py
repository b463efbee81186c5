"""Smaller layers from larger ones. Every reduction returns valid `LayerInputs` and keeps the values that it keeps.

Produced here, tried one by one by `shrink`. A reduction that makes no sense for a layer raises `Impossible`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..cases.rows import window_of
from ..reference.inputs import CompressorInputs, LayerInputs, Span, Step

Kept = Sequence[int]
"""Ascending numbers of the requests, rows, entries, heads or dims that stay."""


class Impossible(ValueError):
    """The layer cannot be reduced this way; the message says why."""


def keep_requests(inputs: LayerInputs, kept: Kept) -> LayerInputs:
    """Only these requests, renumbered from 0, with their rows, tokens, entries and pages."""
    number = {request: place for place, request in enumerate(kept)}
    tokens = _ranges(inputs.token_offset, kept)
    prefix = _ranges(_offsets(inputs.prefix_entries), kept)
    rows = [row for row, request in enumerate(inputs.row_request.tolist()) if request in number]
    if not rows:
        raise Impossible("no row would be left")
    steps = [
        [replace(span, request=number[span.request]) for span in step if span.request in number]
        for step in inputs.steps
    ]
    less = _with_rows(inputs, rows)
    renumbered = torch.tensor([number[request] for request in less.row_request.tolist()])
    moved = replace(
        less,
        lengths=tuple(inputs.lengths[request] for request in kept),
        prefix_entries=tuple(inputs.prefix_entries[request] for request in kept),
        steps=_whole(steps),
        index=_rows_of(inputs.index, tokens, prefix),
        main=_rows_of(inputs.main, tokens, prefix),
        page_table=inputs.page_table[list(kept)],
    )
    return _narrow_pages(_with_windows(moved, renumbered, less.row_position, less.window_index))


def keep_rows(inputs: LayerInputs, kept: Kept) -> LayerInputs:
    """Only these rows; requests stay."""
    less = _with_rows(inputs, kept)
    return _with_windows(less, less.row_request, less.row_position, less.window_index)


def keep_entries(inputs: LayerInputs, kept: Kept) -> LayerInputs:
    """Only the tokens of these packed entries, and each request's tail; rows move up to the last token they still see.

    An entry's overlap is then with the kept entry before it, and its position is that of its new number. Where history
    is given pooled, the last token stays as well: rows are tokens that a step brings.
    """
    masks, chosen = [], set(kept)
    for request, count in enumerate(inputs.entries):
        first = inputs.entry_offset[request]
        block = torch.tensor([first + entry in chosen for entry in range(count)], dtype=torch.bool)
        tail = torch.ones(inputs.lengths[request] - count * inputs.ratio, dtype=torch.bool)
        mask = torch.cat((block.repeat_interleave(inputs.ratio), tail))
        mask[-1] |= bool(inputs.prefix_entries[request])
        masks.append(mask)
    return _keep_tokens(inputs, masks)


def cut_tails(inputs: LayerInputs) -> LayerInputs:
    """No tokens behind the last entry of a request; behind its last row where a layer has no entries."""
    masks = []
    for request, length in enumerate(inputs.lengths):
        rows = inputs.row_position[inputs.row_request == request]
        last = inputs.entries[request] * inputs.ratio if inputs.ratio else int(rows.max()) + 1 if len(rows) else 1
        masks.append(torch.arange(length) < max(last, inputs.prefix_entries[request] * inputs.ratio + 1))
    return _keep_tokens(inputs, masks)


def keep_steps(inputs: LayerInputs, kept: Kept) -> LayerInputs:
    """The steps at `kept` begin where they did, and take in the tokens of the steps after them that are not kept."""
    if 0 not in kept:
        raise Impossible("the first step cannot be merged into an earlier one")
    merged: list[dict[int, Span]] = []
    for place, step in enumerate(inputs.steps):
        if place in kept:
            merged.append({})
        for span in step:
            before = merged[-1].get(span.request)
            merged[-1][span.request] = replace(before, stop=span.stop) if before else span
    return replace(inputs, steps=_whole([list(step.values()) for step in merged]))


def plain_pages(inputs: LayerInputs, first: int) -> LayerInputs:
    """Pages in order from `first`, none of them spare but those before it."""
    if not inputs.ratio:
        return replace(inputs, page_table=torch.full_like(inputs.page_table[:, :1], -1), num_pages=1)
    table, page = torch.full_like(inputs.page_table, -1), first
    for request, count in enumerate(inputs.entries):
        needed = -(-count // inputs.page_size)
        table[request, :needed] = torch.arange(page, page + needed)
        page += needed
    return _narrow_pages(replace(inputs, page_table=table, num_pages=max(1, page)))


def keep_index_heads(inputs: LayerInputs, kept: Kept) -> LayerInputs:
    """Only these heads of the indexer; its scale follows their number."""
    if inputs.index_query is None or inputs.index_weight is None:
        raise Impossible(f"a {inputs.kind} layer has no indexer")
    heads = list(kept)
    return replace(
        inputs,
        config=replace(inputs.config, index_n_heads=len(heads)),
        index_query=inputs.index_query[:, heads].contiguous(),
        index_weight=inputs.index_weight[:, heads].contiguous(),
    )


def keep_attention_heads(inputs: LayerInputs, kept: Kept) -> LayerInputs:
    """Only these attention heads."""
    heads = list(kept)
    return replace(
        inputs,
        config=replace(inputs.config, num_attention_heads=len(heads)),
        attn_query=inputs.attn_query[:, heads].contiguous(),
        attn_sink=inputs.attn_sink[heads].contiguous(),
    )


def keep_window(inputs: LayerInputs, size: int) -> LayerInputs:
    """A sliding window of the last `size` tokens."""
    less = replace(inputs, config=replace(inputs.config, sliding_window=size))
    return _with_windows(less, inputs.row_request, inputs.row_position, inputs.window_index[:, -size:])


def with_topk(inputs: LayerInputs, k: int) -> LayerInputs:
    """The same layer selecting `k` entries a row."""
    return replace(inputs, config=replace(inputs.config, index_topk=k))


def keep_index_dims(inputs: LayerInputs, plain: Kept, turned: Kept) -> LayerInputs:
    """Only these dims of index keys and queries: `plain` without RoPE, `turned` with it, numbered from 0 each.

    The number of turned dims is the model's, so latents and attention queries keep as many of theirs.
    """
    if inputs.index is None or inputs.index_query is None:
        raise Impossible(f"a {inputs.kind} layer has no indexer")
    config = inputs.config
    own = _dims(config.index_head_dim, config.qk_rope_head_dim, plain, turned)
    changed = replace(config, index_head_dim=len(own))
    less = replace(
        inputs,
        config=changed,
        index=_columns_of(inputs.index, own),
        index_query=inputs.index_query[..., own].contiguous(),
    )
    if len(turned) == config.qk_rope_head_dim:
        return less
    every = range(config.head_dim - config.qk_rope_head_dim)
    return _keep_latent_dims(less, _dims(config.head_dim, config.qk_rope_head_dim, every, turned), len(turned))


def keep_head_dims(inputs: LayerInputs, plain: Kept) -> LayerInputs:
    """Only these dims without RoPE of latents and attention queries; those with RoPE stay."""
    config = inputs.config
    rope = config.qk_rope_head_dim
    return _keep_latent_dims(inputs, _dims(config.head_dim, rope, plain, range(rope)), rope)


def _keep_latent_dims(inputs: LayerInputs, dims: list[int], rope: int) -> LayerInputs:
    return replace(
        inputs,
        config=replace(inputs.config, head_dim=len(dims), qk_rope_head_dim=rope),
        main=None if inputs.main is None else _columns_of(inputs.main, dims),
        window_kv=inputs.window_kv[:, dims].contiguous(),
        kv_norm_weight=inputs.kv_norm_weight[dims].contiguous(),
        attn_query=inputs.attn_query[..., dims].contiguous(),
    )


def _dims(width: int, rope: int, plain: Kept, turned: Kept) -> list[int]:
    if len(turned) % 2 or not turned:
        raise Impossible("dims with RoPE come in pairs")
    return [*plain, *(width - rope + dim for dim in turned)]


def _columns_of(read: CompressorInputs, dims: list[int]) -> CompressorInputs:
    width = read.ape.shape[1]
    columns = [part * width + dim for part in range(read.kv_score.shape[1] // width) for dim in dims]
    return CompressorInputs(
        read.kv_score[:, columns].contiguous(),
        read.ape[:, dims].contiguous(),
        read.norm_weight[dims].contiguous(),
        read.pooled_prefix[:, dims].contiguous(),
    )


def _keep_tokens(inputs: LayerInputs, masks: list[Tensor]) -> LayerInputs:
    """Only the tokens in `masks`, bool [length] a request: whole blocks of an entry, any of those behind the last."""
    if any(not bool(mask.any()) for mask in masks):
        raise Impossible("a request would have no token")
    before = [torch.cat((mask.new_zeros(1).long(), mask.long().cumsum(0))) for mask in masks]
    prefix_entries, prefix, tokens = [], [], []
    first_prefix = _offsets(inputs.prefix_entries)
    for request, mask in enumerate(masks):
        given, ratio, start = inputs.prefix_entries[request], inputs.ratio, inputs.first_token(request)
        blocks = mask[: given * ratio : ratio] if ratio else mask[:0]
        prefix_entries.append(int(blocks.sum()))
        prefix += (blocks.nonzero()[:, 0] + first_prefix[request]).tolist()
        own = mask.clone()
        own[: given * ratio] = False
        if prefix_entries[-1]:
            own[start : given * ratio] = True
        tokens += (own.nonzero()[:, 0] - start + inputs.token_offset[request]).tolist()
    steps = [
        [
            Span(span.request, int(before[span.request][span.start]), int(before[span.request][span.stop]))
            for span in step
        ]
        for step in inputs.steps
    ]
    less = replace(
        inputs,
        lengths=tuple(int(mask.sum()) for mask in masks),
        prefix_entries=tuple(prefix_entries),
        steps=_whole([[span for span in step if span.start < span.stop] for step in steps]),
        index=_rows_of(inputs.index, tokens, prefix),
        main=_rows_of(inputs.main, tokens, prefix),
    )
    rows = zip(inputs.row_request.tolist(), inputs.row_position.tolist(), strict=True)
    first = [count * inputs.ratio for count in prefix_entries]
    moved = torch.tensor([max(first[request], int(before[request][position + 1]) - 1) for request, position in rows])
    return _narrow_pages(_with_windows(less, inputs.row_request, moved, inputs.window_index))


def _with_rows(inputs: LayerInputs, kept: Kept) -> LayerInputs:
    """Row tensors of the kept rows; windows still point into the old window tokens."""
    rows = list(kept)

    def part(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[rows].contiguous()

    return replace(
        inputs,
        row_request=inputs.row_request[rows],
        row_position=inputs.row_position[rows],
        index_query=part(inputs.index_query),
        index_weight=part(inputs.index_weight),
        attn_query=inputs.attn_query[rows].contiguous(),
        window_index=inputs.window_index[rows],
    )


def _with_windows(inputs: LayerInputs, request: Tensor, position: Tensor, old: Tensor) -> LayerInputs:
    """Rows at `request` and `position` whose window columns hold the latents that `old` [R, size] points to."""
    window_request, window_position, index = window_of(request, position, old.shape[1])
    latents = inputs.window_kv.new_zeros(len(window_request), inputs.window_kv.shape[1])
    shown = (index >= 0) & (old >= 0)
    latents[index[shown]] = inputs.window_kv[old[shown]]
    return replace(
        inputs,
        row_request=request,
        row_position=position,
        window_kv=latents,
        window_request=window_request,
        window_position=window_position,
        window_index=index,
    )


def _narrow_pages(inputs: LayerInputs) -> LayerInputs:
    """A page table without columns that no request needs, and -1 behind each request's last page."""
    needed = torch.tensor([-(-count // inputs.page_size) for count in inputs.entries])
    width = max(1, int(needed.max()))
    table = inputs.page_table[:, :width].clone()
    table[torch.arange(width) >= needed[:, None]] = -1
    return replace(inputs, page_table=table)


def _rows_of(read: CompressorInputs | None, tokens: list[int], prefix: list[int]) -> CompressorInputs | None:
    if read is None:
        return None
    return replace(read, kv_score=read.kv_score[tokens], pooled_prefix=read.pooled_prefix[prefix])


def _whole(steps: Sequence[Sequence[Span]]) -> tuple[Step, ...]:
    """Steps without those that bring no token."""
    return tuple(tuple(step) for step in steps if step)


def _offsets(counts: Sequence[int]) -> list[int]:
    offsets = [0]
    for count in counts:
        offsets.append(offsets[-1] + count)
    return offsets


def _ranges(offsets: Sequence[int], kept: Kept) -> list[int]:
    return [place for request in kept for place in range(offsets[request], offsets[request + 1])]


@dataclass(frozen=True)
class Axis:
    """Something a layer has a number of, of which fewer may be kept.

    name   as people read it.   size   how many there are; 0 where the layer has none.   keep   the reduction.
    """

    name: str
    size: Callable[[LayerInputs], int]
    keep: Callable[[LayerInputs, Kept], LayerInputs]


AXES: tuple[Axis, ...] = (
    Axis("requests", lambda inputs: len(inputs.lengths), keep_requests),
    Axis("rows", lambda inputs: len(inputs.row_position), keep_rows),
    Axis("entries", lambda inputs: sum(inputs.entries), keep_entries),
    Axis("steps", lambda inputs: len(inputs.steps), keep_steps),
    Axis(
        "index heads", lambda inputs: 0 if inputs.index_query is None else inputs.config.index_n_heads, keep_index_heads
    ),
    Axis("attention heads", lambda inputs: inputs.config.num_attention_heads, keep_attention_heads),
)


@dataclass(frozen=True)
class Size:
    """A constant of a layer that may be smaller.

    now   its value; 0 where the layer has none.   choices   smaller values to try, ascending.   make   the reduction.
    """

    name: str
    now: Callable[[LayerInputs], int]
    choices: Callable[[LayerInputs], list[int]]
    make: Callable[[LayerInputs, int], LayerInputs]


def powers(below: int, least: int = 1) -> list[int]:
    """Powers of two from `least`, all below `below`."""
    found = []
    while least < below:
        found.append(least)
        least *= 2
    return found


def _index_dims(inputs: LayerInputs, size: int) -> LayerInputs:
    """`size` dims of index keys, the first of each half, at most the model's number of them with RoPE."""
    config = inputs.config
    turned = min(config.qk_rope_head_dim, size // 2)
    plain = size - turned
    if plain > config.index_head_dim - config.qk_rope_head_dim:
        raise Impossible("there are not that many dims without RoPE")
    return keep_index_dims(inputs, range(plain), range(turned))


def _head_dims(inputs: LayerInputs, size: int) -> LayerInputs:
    return keep_head_dims(inputs, range(size - inputs.config.qk_rope_head_dim))


SIZES: tuple[Size, ...] = (
    Size(
        "selected entries (k)",
        lambda inputs: inputs.config.index_topk if inputs.kind == "csa" else 0,
        lambda inputs: powers(inputs.config.index_topk),
        with_topk,
    ),
    Size(
        "window",
        lambda inputs: inputs.config.sliding_window,
        lambda inputs: powers(inputs.config.sliding_window),
        keep_window,
    ),
    Size(
        "index dims",
        lambda inputs: inputs.config.index_head_dim if inputs.kind == "csa" else 0,
        lambda inputs: powers(inputs.config.index_head_dim, 4),
        _index_dims,
    ),
    Size(
        "head dims",
        lambda inputs: inputs.config.head_dim,
        lambda inputs: [
            inputs.config.qk_rope_head_dim + plain
            for plain in powers(inputs.config.head_dim - inputs.config.qk_rope_head_dim, 2)
        ],
        _head_dims,
    ),
)
