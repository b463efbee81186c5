"""The Triton kernel behind every bf16 index score: paged or not, one query a tile or several, any schedule.

A tile multiplies KEYS keys by all heads of GROUP queries: product[key, query and head]. ReLU, head weight
and the sum over heads happen in registers, so only scores leave the chip. Keys are the rows of the product: the sum
over heads stays within a warp, and a NaN key spoils no score but its own. ReLU is a maximum that carries a NaN into the
score, where a plain one would make it 0.

Two schedules. Persistent: each program takes an equal share of all tiles, whatever the lengths, and finds its rows by a
prefix sum over the lengths. Split: program (g, s) takes the s-th share of group g.
"""

import triton.language as tl

from .interpreter import Device, Kernel, load_bf16, loop_bound
from .layout import ENTRY_DIM, PAGE_ENTRIES

DIM = tl.constexpr(ENTRY_DIM)
PAGE = tl.constexpr(PAGE_ENTRIES)
NO_END = tl.constexpr(2**31 - 1)


@Device
def clamped(length, width):
    """Lengths of any integer type as int32 in [0, width]."""
    return tl.minimum(tl.maximum(length, 0), width).to(tl.int32)


@Device
def load_keys(
    keys,
    table,
    block,
    key,
    length,
    page_stride,
    KEYS: tl.constexpr,
    PAGED: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """The block's keys [KEYS, 128]; those past `length` repeat earlier ones or lie on the same page: read, never
    used.
    """
    dim = tl.arange(0, DIM)[None, :]
    if DESCRIPTOR:
        tile = tl.reshape(keys.load([tl.load(table + block), 0, 0]), (KEYS, DIM))
    else:
        entry = block * KEYS + key
        if PAGED:
            if KEYS == PAGE:
                page = tl.load(table + block).to(tl.int64)
                slot = page * page_stride + key * DIM
            else:
                last = tl.minimum(entry, length - 1)
                page = tl.load(table + last // PAGE).to(tl.int64)
                slot = page * page_stride + entry % PAGE * DIM
        else:
            slot = tl.minimum(entry, length - 1).to(tl.int64) * DIM
        tile = load_bf16(keys + slot[:, None] + dim, key[:, None] < KEYS, INTERPRETED, "evict_first" if PAGED else "")
    return tile


@Device
def score_blocks(
    query,
    weight,
    keys,
    page_table,
    request,
    lengths,
    out,
    rows,
    page_stride,
    table_stride,
    out_stride,
    width,
    group,
    first,
    stop,
    HEADS: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    NEXT_N: tl.constexpr,
    KEYS: tl.constexpr,
    PAGED: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Scores of one group of rows against key blocks first to stop - 1 of its request."""
    table = page_table
    if PAGED:
        owner = group.to(tl.int64) * GROUP // NEXT_N
        if request is not None:
            owner = tl.load(request + group.to(tl.int64) * GROUP).to(tl.int64)
        table += owner * table_stride
    COLUMNS: tl.constexpr = GROUP * HEAD_BLOCK
    column = tl.arange(0, COLUMNS)
    head = column % HEAD_BLOCK
    row = group.to(tl.int64) * GROUP + column // HEAD_BLOCK
    live = (head < HEADS) & (row < rows)
    at = row * HEADS + head
    w = tl.load(weight + at, mask=live, other=0.0)
    dim = tl.arange(0, DIM)
    q = load_bf16(query + at[None, :] * DIM + dim[:, None], live[None, :], INTERPRETED)

    member = group.to(tl.int64) * GROUP + tl.arange(0, GROUP)
    length = clamped(tl.load(lengths + member, mask=member < rows, other=0), width)
    longest = tl.reduce(length, 0, tl.standard._elementwise_max)
    scores = out + (member * out_stride)[None, :]
    key = tl.arange(0, KEYS)
    for block in tl.range(loop_bound(first), loop_bound(stop)):
        k = load_keys(keys, table, block, key, longest, page_stride, KEYS, PAGED, DESCRIPTOR, INTERPRETED)
        product = tl.dot(k, q)
        terms = tl.maximum(product, 0.0, propagate_nan=tl.PropagateNan.ALL) * w[None, :]
        total = tl.reduce(tl.reshape(terms, (KEYS, GROUP, HEAD_BLOCK)), 2, tl.standard._sum_combine)
        entry = (block * KEYS + key)[:, None]
        tl.store(scores + entry, total, mask=entry < length[None, :])


@Device
def fill_rows(lengths, out, rows, out_stride, width, fill, first, step, COLUMNS: tl.constexpr):
    """Writes `fill` past the length of rows first, first + step, ..."""
    column = tl.arange(0, COLUMNS)
    for row in tl.range(loop_bound(first), loop_bound(rows), loop_bound(step)):
        length = clamped(tl.load(lengths + row), width)
        start = length // COLUMNS * COLUMNS
        for base in tl.range(loop_bound(start), loop_bound(width), COLUMNS):
            at = base + column
            value = tl.full((COLUMNS,), 1.0, tl.float32) * fill
            tl.store(out + row * out_stride.to(tl.int64) + at, value, mask=(at >= length) & (at < width))


@Kernel
def scores_kernel(
    query,
    weight,
    keys,
    page_table,
    request,
    lengths,
    out,
    rows,
    groups,
    page_stride,
    table_stride,
    out_stride,
    width,
    split,
    fill,
    HEADS: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    NEXT_N: tl.constexpr,
    KEYS: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    PERSISTENT: tl.constexpr,
    PAGED: tl.constexpr,
    FILL: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """See the module. split: key blocks of a program in the split schedule. FILL: columns filled at once, 0 for
    none.
    """
    program = tl.program_id(0)
    if FILL > 0:
        programs = tl.num_programs(0) * tl.num_programs(1)
        fill_rows(
            lengths, out, rows, out_stride, width, fill, program + tl.program_id(1) * tl.num_programs(0), programs, FILL
        )
    if PERSISTENT:
        number = tl.arange(0, GROUP_BLOCK)
        longest = tl.full((GROUP_BLOCK,), 0, tl.int32)
        for i in tl.static_range(GROUP):
            row = number * GROUP + i
            longest = tl.maximum(longest, clamped(tl.load(lengths + row, mask=row < rows, other=0), width))
        blocks = (longest + (KEYS - 1)) // KEYS
        ends = tl.associative_scan(blocks, 0, tl.standard._sum_combine)
        total = tl.reduce(blocks, 0, tl.standard._sum_combine).to(tl.int64)
        at = (total * program // tl.num_programs(0)).to(tl.int32)
        last = (total * (program + 1) // tl.num_programs(0)).to(tl.int32)
        while at < last:
            group = tl.reduce((ends <= at).to(tl.int32), 0, tl.standard._sum_combine)
            base = tl.reduce(tl.where(ends <= at, ends, 0), 0, tl.standard._elementwise_max)
            end = tl.reduce(tl.where(ends > at, ends, NO_END), 0, tl.standard._elementwise_min)
            stop = tl.minimum(end, last)
            score_blocks(
                query,
                weight,
                keys,
                page_table,
                request,
                lengths,
                out,
                rows,
                page_stride,
                table_stride,
                out_stride,
                width,
                group,
                at - base,
                stop - base,
                HEADS,
                HEAD_BLOCK,
                GROUP,
                NEXT_N,
                KEYS,
                PAGED,
                DESCRIPTOR,
                INTERPRETED,
            )
            at = stop
    else:
        group = groups - 1 - program
        member = group * GROUP + tl.arange(0, GROUP)
        length = clamped(tl.load(lengths + member, mask=member < rows, other=0), width)
        blocks = (tl.reduce(length, 0, tl.standard._elementwise_max) + (KEYS - 1)) // KEYS
        first = tl.program_id(1) * split
        stop = tl.minimum(first + split, blocks)
        if first < stop:
            score_blocks(
                query,
                weight,
                keys,
                page_table,
                request,
                lengths,
                out,
                rows,
                page_stride,
                table_stride,
                out_stride,
                width,
                group,
                first,
                stop,
                HEADS,
                HEAD_BLOCK,
                GROUP,
                NEXT_N,
                KEYS,
                PAGED,
                DESCRIPTOR,
                INTERPRETED,
            )
