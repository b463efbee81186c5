"""The Hopper prefill kernel: the exact scores, whatever the lengths, layouts and shares; refused operands fall back."""

import math

import pytest
import torch
from difftest.kernels import prefill_cuda
from difftest.kernels.layout import PAGE_BYTES, PAGE_ENTRIES, POISON_BYTE, empty_cache, write_slots
from difftest.kernels.score import contiguous_scores, paged_scores
from difftest.kernels.tile import HOPPER_PREFILL
from difftest.reference.indexer import score as exact_score
from torch import Tensor

FP32_UNIT = 2.0**-24
ROUNDINGS = 200
"""128 fp32 sums of a product, 64 of the heads, ReLU and weight, each at most one unit of the sum of magnitudes."""


@pytest.fixture
def hopper() -> torch.device:
    device = torch.device("cuda", 0)
    if not torch.cuda.is_available() or not prefill_cuda.available(device):
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
@pytest.mark.parametrize("pattern", LENGTHS)
@pytest.mark.parametrize(("rows", "keys"), [(1, 1), (5, 64), (8, 1000), (203, 777), (1601, 130)])
def test_contiguous_keys(hopper: torch.device, rows: int, keys: int, pattern: str) -> None:
    query, weight, key = operands(rows, keys, hopper)
    lengths = LENGTHS[pattern](rows, keys).to(hopper)
    got = contiguous_scores(query, weight, key, lengths, width=keys, tile=HOPPER_PREFILL)
    assert_exact(got, query, weight, key, lengths.clamp(0, keys), -math.inf)


@pytest.mark.gpu
@pytest.mark.parametrize("request_given", [True, False])
@pytest.mark.parametrize("wide", [torch.int32, torch.int64])
def test_paged_keys_of_two_requests(hopper: torch.device, request_given: bool, wide: torch.dtype) -> None:
    """Shuffled pages with poison around and behind them, and the last page's unwritten slots NaN."""
    rows, count = 32, 300
    query, weight, key = operands(2 * rows, 2 * count, hopper)
    pages = -(-count // PAGE_ENTRIES)
    cache = empty_cache(2 * pages + 3, hopper, PAGE_BYTES + 1024, POISON_BYTE)
    order = (torch.randperm(len(cache) - 1) + 1)[: 2 * pages].view(2, pages).to(hopper)
    entry = torch.arange(count, device=hopper)
    for request in range(2):
        slots = order[request, entry // PAGE_ENTRIES] * PAGE_ENTRIES + entry % PAGE_ENTRIES
        write_slots(cache, slots, key[request * count :][:count])
    lengths = torch.randint(0, count + 1, (2 * rows,), device=hopper)
    request = torch.arange(2, device=hopper).repeat_interleave(rows) if request_given else None
    got = paged_scores(
        query, weight, cache, order.to(wide), lengths, request, width=count, next_n=rows, tile=HOPPER_PREFILL
    )
    for number in range(2):
        own = slice(number * rows, (number + 1) * rows)
        keys = key[number * count :][:count]
        assert_exact(got[own], query[own], weight[own], keys, lengths[own], -math.inf)


@pytest.mark.gpu
def test_nothing_outside_out_is_written_and_runs_are_equal(hopper: torch.device) -> None:
    rows, keys = 77, 333
    query, weight, key = operands(rows, keys, hopper)
    lengths = torch.randint(0, keys + 1, (rows,), device=hopper)
    buffer = torch.full((rows + 2, keys + 40), 1e30, device=hopper)
    out = buffer[1:-1, 16 : 16 + keys]
    first = contiguous_scores(query, weight, key, lengths, width=keys, out=out, fill=None, tile=HOPPER_PREFILL).clone()
    assert_exact(first, query, weight, key, lengths, 1e30)
    for _ in range(19):
        contiguous_scores(query, weight, key, lengths, width=keys, out=out, fill=None, tile=HOPPER_PREFILL)
        assert torch.equal(out, first)
    out.fill_(1e30)
    assert (buffer == 1e30).all()


@pytest.mark.gpu
def test_nan_keys_spoil_only_their_own_scores(hopper: torch.device) -> None:
    query, weight, key = operands(16, 200, hopper)
    key[70] = math.nan
    lengths = torch.full((16,), 200, device=hopper)
    got = contiguous_scores(query, weight, key, lengths, width=200, tile=HOPPER_PREFILL)
    assert got[:, 70].isnan().all()
    assert not got[:, torch.arange(200, device=hopper) != 70].isnan().any()


def test_other_operands_are_left_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 heads, whole groups of rows a request, at most MOST_ROWS rows; and only where the kernel is available."""
    query = torch.empty(16, 64, 128, dtype=torch.bfloat16, device="meta")
    assert not prefill_cuda.serves(query, 16)
    monkeypatch.setattr(prefill_cuda, "available", lambda device: True)
    assert prefill_cuda.serves(query, 16) and prefill_cuda.serves(query, 8) and prefill_cuda.serves(query[:3], 4)
    assert not prefill_cuda.serves(query, 4)
    assert not prefill_cuda.serves(query[:, :32], 16)
    assert not prefill_cuda.serves(query.new_empty(prefill_cuda.MOST_ROWS + 1, 64, 128), 1 << 20)
