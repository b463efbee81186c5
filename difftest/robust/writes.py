"""Checks of store and query kernels: repeats, batches, graphs, and memory that is not theirs."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from ..kernels import prepare_cuda, query, store
from ..kernels.cuda import find_nvcc
from ..kernels.layout import ENTRY_DIM, NO_SLOT, PAGE_BYTES, PAGE_ENTRIES, POISON_BYTE, empty_cache, read_slots
from ..kernels.rope import rope_table
from ..verdict import Verdict
from .finding import difference, same_bits, verdict
from .reads import REPEATS, SEED
from .scene import HEADS, PAGE_PADDING

ENTRIES, ROWS, POSITIONS, PAGES = 67, 5, 4096, 4
EPS = 1e-6

Stored = tuple[Tensor, Tensor]
"""The stored entries bf16 [n, 128], and the whole pool uint8 [pages, page stride]."""


@dataclass(frozen=True)
class Operands:
    """pooled fp32 [E, 128] with every seventh row unstored, slots int64 [E], positions, norm weight, RoPE table."""

    pooled: Tensor
    norm_weight: Tensor
    table: Tensor
    positions: Tensor
    slots: Tensor
    query: Tensor
    weight: Tensor


def operands(device: str) -> Operands:
    generator = torch.Generator().manual_seed(SEED)
    slots = torch.randperm(PAGES * PAGE_ENTRIES, generator=generator)[:ENTRIES]
    slots[::7] = NO_SLOT
    made = (
        torch.randn(ENTRIES, ENTRY_DIM, generator=generator),
        torch.randn(ENTRY_DIM, generator=generator),
        rope_table(torch.arange(POSITIONS)),
        torch.randint(POSITIONS, (ENTRIES,), generator=generator),
        slots,
        torch.randn(ROWS, HEADS, ENTRY_DIM, generator=generator).bfloat16(),
        torch.randn(ROWS, HEADS, generator=generator).bfloat16(),
    )
    return Operands(*(tensor.to(device) for tensor in made))


def modules(device: str) -> dict[str, tuple[ModuleType, ModuleType]]:
    """(store, query) kernels that run on `device`, by name."""
    found: dict[str, tuple[ModuleType, ModuleType]] = {"Triton": (store, query)}
    if device == "cuda" and find_nvcc() is not None:
        found["CUDA"] = (prepare_cuda, prepare_cuda)
    return found


def check(device: str, repeats: int = REPEATS) -> Iterator[Verdict]:
    """Verdicts on every store and query kernel that runs on `device`."""
    given = operands(device)
    for name, (stores, queries) in modules(device).items():
        yield from check_store(f"store, {name}", stores.store, given, device, repeats)
        yield from check_query(f"query, {name}", queries.prepare_query, given, device, repeats)


def check_store(
    name: str, kernel: Callable[..., None], given: Operands, device: str, repeats: int = REPEATS
) -> Iterator[Verdict]:
    """Verdicts on one store."""

    def run(pick: Tensor) -> Stored:
        cache = empty_cache(PAGES, device, PAGE_BYTES + PAGE_PADDING, POISON_BYTE)
        slots = given.slots[pick].contiguous()
        kernel(
            given.pooled[pick].contiguous(), given.norm_weight, EPS, given.table,
            given.positions[pick].contiguous(), slots, cache,
        )  # fmt: skip
        return read_slots(cache, slots[slots >= 0]), cache

    every = torch.arange(ENTRIES, device=device)
    base, cache = run(every)
    yield verdict(name, "index_k", f"{repeats} runs bitwise equal", _repeats(lambda: run(every)[1], cache, repeats))
    kept = every[given.slots >= 0]
    alone = torch.cat([run(kept[number : number + 1])[0] for number in range(0, len(kept), 9)])
    want = base[::9].contiguous()
    yield verdict(name, "index_k", "batch invariance", "" if same_bits(alone, want) else difference(alone, want))
    yield verdict(name, "index_k", "guards untouched", _only_slots(cache, given.slots))
    if device == "cuda":
        target = empty_cache(PAGES, device, PAGE_BYTES + PAGE_PADDING, POISON_BYTE)
        launch = lambda: kernel(  # noqa: E731
            given.pooled, given.norm_weight, EPS, given.table, given.positions, given.slots, target
        )
        yield verdict(name, "index_k", "graph replay equals eager", _graph(launch, target, cache))


def _only_slots(cache: Tensor, slots: Tensor) -> str:
    """Whether all bytes outside the slots given are still poison: other slots, and the padding behind pages."""
    untouched = cache[:, :PAGE_BYTES].reshape(PAGES * PAGE_ENTRIES, -1).clone()
    untouched[slots[slots >= 0]] = POISON_BYTE
    wrong = int((untouched != POISON_BYTE).sum()) + int((cache[:, PAGE_BYTES:] != POISON_BYTE).sum())
    return f"{wrong} bytes outside the slots were written" if wrong else ""


def check_query(
    name: str,
    kernel: Callable[..., tuple[Tensor, Tensor | None]],
    given: Operands,
    device: str,
    repeats: int = REPEATS,
) -> Iterator[Verdict]:
    """Verdicts on one query kernel."""
    positions = given.positions[:ROWS].contiguous()

    def run(rows: slice = slice(None)) -> Tensor:
        out, weight = kernel(given.query[rows], given.weight[rows], given.table, positions[rows])
        assert weight is not None
        return torch.cat((out.float().flatten(1), weight), 1)

    base = run()
    yield verdict(name, "index_q", f"{repeats} runs bitwise equal", _repeats(run, base, repeats))
    alone = torch.cat([run(slice(row, row + 1)) for row in range(ROWS)])
    yield verdict(name, "index_q", "batch invariance", "" if same_bits(alone, base) else difference(alone, base))
    if device == "cuda":
        target = torch.zeros_like(base)
        yield verdict(name, "index_q", "graph replay equals eager", _graph(lambda: target.copy_(run()), target, base))


def _repeats(run: Callable[[], Tensor], base: Tensor, repeats: int) -> str:
    for number in range(1, repeats):
        again = run()
        if not same_bits(again, base):
            return f"run {number} and the first: {difference(again, base)}"
    return ""


def _graph(launch: Callable[[], object], target: Tensor, base: Tensor) -> str:
    """Captures a launch that writes `target`, clears it and replays: the bytes are those of an eager run."""
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    target.fill_(POISON_BYTE if target.dtype == torch.uint8 else 0)
    graph.replay()
    torch.cuda.synchronize()
    return "" if same_bits(target, base) else f"replay and eager: {difference(target, base)}"
