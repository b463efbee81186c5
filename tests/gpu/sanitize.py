"""Small launches of every bf16 kernel for compute-sanitizer, each result compared with fp64 on the CPU.

Run by `make sanitize`, with torch's caching allocator off, so that every tensor is an allocation of its own and an
access one byte past it is seen. Operands are made on the CPU, so that no other kernel fills the memory watched.
"""

import os
import sys

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

import torch
from difftest.kernels import prepare_cuda, query, store
from difftest.kernels.hopper import available
from difftest.kernels.layout import PAGE_BYTES, PAGE_ENTRIES, empty_cache, read_slots, write_slots
from difftest.kernels.rope import rope_table
from difftest.kernels.score import contiguous_scores, paged_scores
from difftest.kernels.tile import HOPPER_FOUR, HOPPER_TILE, Tile
from difftest.reference.indexer import score as exact_score

DEVICE = torch.device("cuda", 0)
TOLERANCE = 1e-4
"""Of the sum of magnitudes: far above fp32 rounding, far below any wrong element."""
COUNTS = (0, 5, 64, 130)
TRITON = {"decode": Tile(), "split": Tile(programs=0, split=1), "prefill": Tile(group=2, stages=3, programs=0, split=2)}


def check(name: str, got: torch.Tensor, query: torch.Tensor, weight: torch.Tensor, keys: torch.Tensor) -> None:
    exact = exact_score(query.double(), keys.double(), weight.double())
    size = exact_score(query.double().abs(), keys.double().abs(), weight.double().abs())
    worst = ((got.cpu().double() - exact).abs() / size.clamp_min(1e-30)).max() if exact.numel() else 0
    if worst > TOLERANCE:
        sys.exit(f"{name}: off by {float(worst):.1e} of the sum of magnitudes")


def reads(tile: Tile, next_n: int, counts: tuple[int, ...], name: str) -> None:
    pages = [-(-count // PAGE_ENTRIES) for count in counts]
    cache = empty_cache(max(1, sum(pages)), page_stride=PAGE_BYTES + 1024, fill=0x3F)
    order = torch.randperm(sum(pages)).split(pages)
    table = torch.zeros(len(counts), max(1, *pages), dtype=torch.int32)
    keys = [torch.randn(count, 128).bfloat16() for count in counts]
    for number, own in enumerate(order):
        table[number, : len(own)] = own
        entry = torch.arange(counts[number])
        write_slots(cache, own[entry // PAGE_ENTRIES] * PAGE_ENTRIES + entry % PAGE_ENTRIES, keys[number])
    rows = len(counts) * next_n
    q, w = torch.randn(rows, 64, 128).bfloat16(), torch.randn(rows, 64)
    lengths = torch.tensor(counts).repeat_interleave(next_n)
    operands = (q, w, cache, table, lengths)
    got = paged_scores(*(x.to(DEVICE) for x in operands), width=max(counts), next_n=next_n, tile=tile)
    for number, key in enumerate(keys):
        own = slice(number * next_n, (number + 1) * next_n)
        check(f"{name}, request {number}", got[own, : len(key)], q[own], w[own], key)
    key = keys[-1]
    own = slice(rows - next_n, rows)
    if tile.programs == 0 or tile.kernel != "triton":
        operands = (q[own].contiguous(), w[own].contiguous(), key, lengths[own].contiguous())
        got = contiguous_scores(*(x.to(DEVICE) for x in operands), width=len(key), tile=tile)
        check(f"{name}, contiguous", got, q[own], w[own], key)


def writes(name: str, stores: object, queries: object) -> None:
    pooled, weight, slots = torch.randn(9, 128), torch.randn(128), torch.tensor([3, -1, 70, 5, 0, 127, 64, 63, -1])
    table, positions = rope_table(torch.arange(50)), torch.arange(9) * 5
    cache = empty_cache(2, DEVICE, fill=0)
    operands = (pooled, weight, 1e-6, table, positions, slots, cache)
    stores.store(*(x.to(DEVICE) if isinstance(x, torch.Tensor) else x for x in operands))  # type: ignore[attr-defined]
    stored = read_slots(cache, slots[slots >= 0].to(DEVICE)).cpu().float()
    plain = empty_cache(2)
    store.store(pooled, weight, 1e-6, table, positions, slots, plain)
    want = read_slots(plain, slots[slots >= 0]).float()
    if (stored - want).abs().max() > want.abs().max() * 2**-7:
        sys.exit(f"{name}: store differs from the interpreted kernel")
    q, w = torch.randn(3, 64, 128).bfloat16(), torch.randn(3, 64).bfloat16()
    arguments = (q, w, table, positions[:3].contiguous())
    rotated, _ = queries.prepare_query(*(x.to(DEVICE) for x in arguments))  # type: ignore[attr-defined]
    want = query.prepare_query(*arguments)[0].float()
    if (rotated.cpu().float() - want).abs().max() > want.abs().max() * 2**-7:
        sys.exit(f"{name}: query differs from the interpreted kernel")


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(2)
    for name, tile in TRITON.items():
        reads(tile, 6 if name == "prefill" else 1, COUNTS, f"Triton {name}")
    if available(DEVICE):
        for next_n in (1, 2, 8):
            reads(HOPPER_TILE, next_n, COUNTS, f"Hopper, {next_n} rows a request")
        reads(HOPPER_FOUR, 8, COUNTS, "Hopper, four warpgroups")
    writes("Triton", store, query)
    writes("CUDA", prepare_cuda, prepare_cuda)
    torch.cuda.synchronize()
    print("every result is right")


main()
