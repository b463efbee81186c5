"""The Hopper kernels: the exact scores, whatever the lengths, layouts and shares; other operands are left to Triton."""

import math

import pytest
import torch
from difftest.kernels import hopper
from difftest.kernels.layout import PAGE_BYTES, PAGE_ENTRIES, POISON_BYTE, empty_cache, write_slots
from difftest.kernels.score import contiguous_scores, paged_scores
from difftest.kernels.tile import HOPPER_FOUR, HOPPER_TILE, PREFILL, Tile
from difftest.reference.indexer import score as exact_score
from torch import Tensor

BOTH = pytest.mark.parametrize("tile", [HOPPER_TILE, HOPPER_FOUR], ids=["two", "four"])
FP32_UNIT = 2.0**-24
ROUNDINGS = 200
"""128 fp32 sums of a product, 64 of the heads, ReLU and weight, each at most one unit of the sum of magnitudes."""


@pytest.fixture
def gpu() -> torch.device:
    device = torch.device("cuda", 0)
    if not torch.cuda.is_available() or not hopper.available(device):
        pytest.skip("no Hopper GPU with nvcc here: its kernel is compiled (test_cuda.py) and not run")
    return device


def operands(rows: int, keys: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    query = torch.randn(rows, 64, 128).bfloat16().to(device)
    return query, torch.randn(rows, 64).to(device), torch.randn(keys, 128).bfloat16().to(device)


def assert_exact(got: Tensor, query: Tensor, weight: Tensor, keys: Tensor, lengths: Tensor, fill: float) -> None:
    exact = exact_score(query.double(), keys.double(), weight.double())
    rad = ROUNDINGS * FP32_UNIT * exact_score(query.double().abs(), keys.double().abs(), weight.double().abs())
    seen = torch.arange(got.shape[1], device=got.device) < lengths[:, None]
    wrong = seen & ~((got - exact).abs() <= rad)
    assert not wrong.any(), (
        f"{int(wrong.sum())} of {int(seen.sum())} scores off, first at {wrong.nonzero()[0].tolist()}"
    )
    rest = got[~seen]
    assert torch.equal(rest, torch.full_like(rest, fill))


LENGTHS = {
    "full": lambda rows, keys: torch.full((rows,), keys),
    "causal": lambda rows, keys: torch.arange(1, rows + 1) * keys // rows,
    "random": lambda rows, keys: torch.randint(-3, keys + 5, (rows,)),
    "mostly empty": lambda rows, keys: torch.where(torch.arange(rows) % 37 == 5, keys, 0),
}


@pytest.mark.gpu
@BOTH
@pytest.mark.parametrize("pattern", LENGTHS)
@pytest.mark.parametrize(("rows", "keys"), [(1, 1), (5, 64), (8, 1000), (203, 777), (1601, 130)])
def test_contiguous_keys(gpu: torch.device, tile: Tile, rows: int, keys: int, pattern: str) -> None:
    query, weight, key = operands(rows, keys, gpu)
    lengths = LENGTHS[pattern](rows, keys).to(gpu)
    got = contiguous_scores(query, weight, key, lengths, width=keys, tile=tile)
    assert_exact(got, query, weight, key, lengths.clamp(0, keys), -math.inf)


@pytest.mark.gpu
@BOTH
@pytest.mark.parametrize("request_given", [True, False])
@pytest.mark.parametrize("wide", [torch.int32, torch.int64])
def test_paged_keys_of_two_requests(gpu: torch.device, tile: Tile, request_given: bool, wide: torch.dtype) -> None:
    """Shuffled pages with poison around and behind them, and the last page's unwritten slots NaN."""
    rows, count = 32, 300
    query, weight, key = operands(2 * rows, 2 * count, gpu)
    pages = -(-count // PAGE_ENTRIES)
    cache = empty_cache(2 * pages + 3, gpu, PAGE_BYTES + 1024, POISON_BYTE)
    order = (torch.randperm(len(cache) - 1) + 1)[: 2 * pages].view(2, pages).to(gpu)
    entry = torch.arange(count, device=gpu)
    for request in range(2):
        slots = order[request, entry // PAGE_ENTRIES] * PAGE_ENTRIES + entry % PAGE_ENTRIES
        write_slots(cache, slots, key[request * count :][:count])
    lengths = torch.randint(0, count + 1, (2 * rows,), device=gpu)
    request = torch.arange(2, device=gpu).repeat_interleave(rows) if request_given else None
    got = paged_scores(query, weight, cache, order.to(wide), lengths, request, width=count, next_n=rows, tile=tile)
    for number in range(2):
        own = slice(number * rows, (number + 1) * rows)
        keys = key[number * count :][:count]
        assert_exact(got[own], query[own], weight[own], keys, lengths[own], -math.inf)


@pytest.mark.gpu
@BOTH
def test_nothing_outside_out_is_written_and_runs_are_equal(gpu: torch.device, tile: Tile) -> None:
    rows, keys = 77, 333
    query, weight, key = operands(rows, keys, gpu)
    lengths = torch.randint(0, keys + 1, (rows,), device=gpu)
    buffer = torch.full((rows + 2, keys + 40), 1e30, device=gpu)
    out = buffer[1:-1, 16 : 16 + keys]
    first = contiguous_scores(query, weight, key, lengths, width=keys, out=out, fill=None, tile=tile).clone()
    assert_exact(first, query, weight, key, lengths, 1e30)
    for _ in range(19):
        contiguous_scores(query, weight, key, lengths, width=keys, out=out, fill=None, tile=tile)
        assert torch.equal(out, first)
    out.fill_(1e30)
    assert (buffer == 1e30).all()


@pytest.mark.gpu
@BOTH
@pytest.mark.parametrize("rows", [1, 2, 203])
def test_bits_are_those_of_the_triton_kernel(gpu: torch.device, tile: Tile, rows: int) -> None:
    """So a score does not depend on the batch it came in, although the kernel does."""
    query, weight, key = operands(rows, 1000, gpu)
    lengths = torch.full((rows,), 1000, device=gpu)
    got = contiguous_scores(query, weight, key, lengths, width=1000, tile=tile)
    assert torch.equal(got, contiguous_scores(query, weight, key, lengths, width=1000, tile=PREFILL))


@pytest.mark.gpu
@BOTH
@pytest.mark.parametrize("next_n", [1, 2, 64])
def test_rings_that_wrap_many_times(gpu: torch.device, tile: Tile, next_n: int) -> None:
    """Hundreds of tiles a block, from more memory than any cache holds: copies arrive late and out of order."""
    requests, count = 64 // next_n, 32_768
    cache = torch.empty(requests * count // PAGE_ENTRIES, PAGE_BYTES, dtype=torch.uint8, device=gpu)
    cache.view(torch.bfloat16).normal_()
    table = torch.randperm(len(cache), device=gpu).to(torch.int32).view(requests, -1)
    query, weight, _ = operands(64, 1, gpu)
    lengths = torch.full((64,), count - 5, dtype=torch.int32, device=gpu)
    arguments = (query, weight, cache, table, lengths)
    triton = PREFILL if next_n > 2 else Tile(group=next_n)
    want = paged_scores(*arguments, width=count, next_n=next_n, tile=triton)
    for _ in range(10):
        assert torch.equal(paged_scores(*arguments, width=count, next_n=next_n, tile=tile), want)


@pytest.mark.gpu
def test_nan_keys_spoil_only_their_own_scores(gpu: torch.device) -> None:
    query, weight, key = operands(16, 200, gpu)
    key[70] = math.nan
    lengths = torch.full((16,), 200, device=gpu)
    got = contiguous_scores(query, weight, key, lengths, width=200, tile=HOPPER_TILE)
    assert got[:, 70].isnan().all()
    assert not got[:, torch.arange(200, device=gpu) != 70].isnan().any()


@pytest.mark.gpu
@pytest.mark.parametrize("next_n", [1, 2])
@pytest.mark.parametrize("wide", [torch.int32, torch.int64])
def test_decode_steps_of_ragged_requests(gpu: torch.device, next_n: int, wide: torch.dtype) -> None:
    """Requests from empty to many pages, more than a share holds; every unread page and slot is NaN."""
    counts = [0, 1, 63, 64, 65, 5000, 128, 7, 40_001, 300] + [70] * 150
    pages = [-(-count // PAGE_ENTRIES) for count in counts]
    cache = empty_cache(sum(pages) + 3, gpu, PAGE_BYTES + 1024, POISON_BYTE)
    order = (torch.randperm(len(cache) - 1) + 1)[: sum(pages)].to(gpu).split(pages)
    table = torch.full((len(counts), max(pages)), -1, dtype=wide, device=gpu)
    keys = []
    for number, own in enumerate(order):
        entry = torch.arange(counts[number], device=gpu)
        keys.append(torch.randn(counts[number], 128).bfloat16().to(gpu))
        table[number, : len(own)] = own
        write_slots(cache, own[entry // PAGE_ENTRIES] * PAGE_ENTRIES + entry % PAGE_ENTRIES, keys[-1])
    query, weight, _ = operands(len(counts) * next_n, 1, gpu)
    ends = torch.tensor(counts, device=gpu)[:, None] - next_n + 1 + torch.arange(next_n, device=gpu)
    lengths, width = ends.flatten().contiguous(), max(counts)
    got = paged_scores(query, weight, cache, table, lengths, width=width, next_n=next_n, tile=HOPPER_TILE)
    again = paged_scores(query, weight, cache, table, lengths, width=width, next_n=next_n, tile=HOPPER_TILE)
    assert torch.equal(got, again)
    for number, key in enumerate(keys):
        own = slice(number * next_n, (number + 1) * next_n)
        seen = lengths[own].clamp_min(0)
        if len(key):
            assert_exact(got[own, : len(key)], query[own], weight[own], key, seen, -math.inf)
        assert (got[own, len(key) :] == -math.inf).all()


def test_other_operands_are_left_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 heads, whole groups of rows a request, no more groups than a block scans; and only on Hopper."""
    query = torch.empty(16, 64, 128, dtype=torch.bfloat16, device="meta")
    assert hopper.kernel_for(query, 16) is None
    monkeypatch.setattr(hopper, "available", lambda device: True)
    assert hopper.kernel_for(query, 16) == hopper.kernel_for(query, 8) == hopper.PREFILL_TWO
    assert hopper.kernel_for(query[:3], 4) == hopper.PREFILL_TWO
    assert hopper.kernel_for(query, 16, hopper.PREFILL_FOUR) == hopper.PREFILL_FOUR
    assert hopper.kernel_for(query, 4) is None
    assert hopper.kernel_for(query, 1) == hopper.kernel_for(query[:1], 9) == hopper.DECODE_ONE
    assert hopper.kernel_for(query, 2) == hopper.DECODE_TWO
    assert hopper.kernel_for(query[:, :32], 16) is None
    assert hopper.kernel_for(query.new_empty(hopper.MOST_GROUPS + 1, 64, 128), 1) is None
    assert hopper.kernel_for(query.new_empty(8 * hopper.MOST_GROUPS + 1, 64, 128), 1 << 20) is None


def test_a_tile_that_does_not_serve_the_operands_is_refused() -> None:
    query, weight, key = operands(4, 70, torch.device("cpu"))
    with pytest.raises(ValueError, match="the Hopper kernels take 64 heads"):
        contiguous_scores(query, weight, key, torch.full((4,), 70), tile=HOPPER_TILE)
