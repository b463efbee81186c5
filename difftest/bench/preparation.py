"""Stores and queries: what is done to a key before it is cached, and to a query before it is scored."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from ..kernels import prepare_cuda, query, store
from ..kernels.layout import ENTRY_BYTES, ENTRY_DIM, PAGE_ENTRIES
from ..kernels.rope import rope_table
from . import fp8
from .capacity import FP8_ENTRY_BYTES
from .operands import HEADS, Pools, rows
from .reads import BF16, TRITON, later
from .row import FP8
from .timing import Contender

RATIO = 4
EPS = 1e-6
POSITIONS = 1 << 17
CALLS = 8
"""Calls on different memory."""
POOLED_BYTES = 4 * ENTRY_DIM
TURN_BYTES = 256
"""Cosines and sines of a position."""
STORE_ENTRIES = (64, 8192)
QUERY_ROWS = (64, 8192)


def stores(pools: Pools, entries: int) -> list[Contender]:
    """Norm, RoPE, Hadamard and store of one prefill's entries, by SGLang's own compress plan where there is one."""
    generator = pools.generator
    pooled = [torch.randn(entries, ENTRY_DIM, device="cuda", generator=generator) for _ in range(CALLS)]
    weight = torch.randn(ENTRY_DIM, device="cuda", generator=generator)
    table = rope_table(torch.arange(entries * RATIO)).cuda()
    complex_table = torch.view_as_complex(table.view(len(table), -1, 2))
    slots = [_slots(pools, entries, number) for number in range(CALLS)]
    locations = []
    for slot in slots:
        location = torch.zeros(entries * RATIO, dtype=torch.int64, device="cuda")
        location[RATIO - 1 :: RATIO] = slot
        locations.append(location)
    positions = torch.arange(entries, device="cuda") * RATIO
    shape = f"{entries} entries"

    def contender(form: str, launches: Sequence[Callable[[], object]], stored: int, note: str = "") -> Contender:
        count = entries * (POOLED_BYTES + TURN_BYTES + stored)
        return Contender("store", form, shape, launches, count, 0, "copy", note=note)

    def sglang() -> list[Callable[[], object]]:
        plan = fp8.prefill_plan(entries * RATIO, RATIO)
        torch.cuda.synchronize()
        return fp8.store(pooled, plan, weight, EPS, complex_table, locations, pools.fp8)

    def planned() -> list[Callable[[], object]]:
        plan = fp8.prefill_plan(entries * RATIO, RATIO).plan_c
        torch.cuda.synchronize()
        return [
            partial(
                prepare_cuda.store_planned, values, plan, weight, EPS, table, location, pools.bf16,
                mode="prefill", ratio=RATIO,
            )
            for values, location in zip(pooled, locations, strict=True)
        ]  # fmt: skip

    triton = [
        partial(store.store, values, weight, EPS, table, positions, slot, pools.bf16)
        for values, slot in zip(pooled, slots, strict=True)
    ]
    return [
        contender(FP8, later(sglang), FP8_ENTRY_BYTES),
        contender(BF16, later(planned), ENTRY_BYTES, "CUDA, SGLang's plan"),
        contender(TRITON, triton, ENTRY_BYTES),
    ]


def _slots(pools: Pools, entries: int, number: int) -> Tensor:
    """Pool slots of `entries` consecutive entries on shuffled pages of their own, int64."""
    pages = -(-entries // PAGE_ENTRIES)
    page = pools.shuffle[number * pages : (number + 1) * pages].long()
    return (page[:, None] * PAGE_ENTRIES + torch.arange(PAGE_ENTRIES, device="cuda")).flatten()[:entries]


def queries(pools: Pools, count: int) -> list[Contender]:
    """RoPE, Hadamard and rounding of the queries, and the head weights; `bf16 K, fp8 q` quantises the query only."""
    generator = pools.generator
    values = [rows(count, generator).query for _ in range(max(2, min(CALLS, 32768 // count)))]
    weight = torch.randn(count, HEADS, device="cuda", generator=generator).bfloat16()
    table = rope_table(torch.arange(POSITIONS)).cuda()
    complex_table = torch.view_as_complex(table.view(len(table), -1, 2))
    positions = torch.randint(POSITIONS, (count,), device="cuda", generator=generator, dtype=torch.int32)
    shape = f"{count} rows"
    scale = query.head_scale(HEADS)
    size = values[0].nbytes

    def contender(form: str, launches: Sequence[Callable[[], object]], out: int, note: str = "") -> Contender:
        weights = count * HEADS * 6
        result = out + count * HEADS * 4
        return Contender(
            "query", form, shape, launches, size + out + weights + count * TURN_BYTES, 0, "copy", result, note
        )

    return [
        contender(FP8, later(lambda: fp8.query(values, weight, scale, complex_table, positions)), size // 2),
        contender(
            BF16,
            [partial(prepare_cuda.prepare_query, value, weight, table, positions) for value in values],
            size,
            "CUDA",
        ),
        contender(
            TRITON,
            [partial(query.prepare_query, value, weight, table, positions) for value in values],
            size,
        ),
        contender(
            "fp8, bf16 K",
            [partial(query.index_query_fp8, value, table, positions) for value in values],
            size // 2,
            "Triton, option q=fp8",
        ),
    ]
