"""Paged scores, and the gathered ones: right within fp32 arithmetic, blind to everything that a row may not see."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from difftest.kernels.layout import PAGE_BYTES, PAGE_ENTRIES, POISON_BYTE, empty_cache, write_slots
from difftest.kernels.naive import gathered_scores
from difftest.kernels.score import contiguous_scores, paged_scores
from difftest.kernels.tile import PREFILL, Tile
from difftest.reference.indexer import score as exact_score
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

FP32_UNIT = 2.0**-24
Scores = Callable[..., Tensor]
BOTH = pytest.mark.parametrize("scores", [paged_scores, gathered_scores])


@dataclass
class Scene:
    """Requests whose keys lie in a poisoned pool on shuffled pages, and rows that look at them."""

    query: Tensor
    weight: Tensor
    cache: Tensor
    table: Tensor
    lengths: Tensor
    request: Tensor
    keys: list[Tensor]

    def exact(self, row: int) -> tuple[Tensor, Tensor]:
        """Row's scores in fp64 and their radius.

        A product of 128 bf16 pairs is exact term by term and summed in fp32: 128 units of the sum of magnitudes. ReLU
        does not grow an error; weight and sum over heads add 1 + 64 units of terms that are no larger: 200 units in
        all.
        """
        count = int(self.lengths[row].clamp_min(0))
        q, w, k = self.query[row : row + 1].cpu(), self.weight[row : row + 1].cpu(), self.keys[int(self.request[row])]
        rad = 200 * FP32_UNIT * exact_score(q.abs(), k[:count].abs(), w.abs())
        return exact_score(q, k[:count], w)[0], rad[0]

    def assert_scored(self, got: Tensor, fill: float = -math.inf) -> None:
        for row in range(len(self.query)):
            exact, rad = self.exact(row)
            assert ((got[row, : len(exact)].cpu() - exact).abs() <= rad).all()
            rest = got[row, len(exact) :]
            assert torch.equal(rest, torch.full_like(rest, fill))


def scene(
    device: str, lengths: list[int], requests: list[int], counts: list[int], heads: int = 64, padding: int = 1024
) -> Scene:
    """Rows of `lengths` on `requests`; request n has counts[n] keys. Pages are shuffled, everything else is NaN."""
    pages = [-(-count // PAGE_ENTRIES) for count in counts]
    cache = empty_cache(sum(pages) + 4, page_stride=PAGE_BYTES + padding, fill=POISON_BYTE)
    order = (torch.randperm(len(cache) - 1) + 1)[: sum(pages)].split(pages)
    table = torch.full((len(counts), max(pages) + 1), -1, dtype=torch.int32)
    keys = [torch.randn(count, 128).bfloat16() for count in counts]
    for number, (own, key) in enumerate(zip(order, keys, strict=True)):
        table[number, : len(own)] = own
        entry = torch.arange(len(key))
        write_slots(cache, own[entry // PAGE_ENTRIES] * PAGE_ENTRIES + entry % PAGE_ENTRIES, key)
    return Scene(
        torch.randn(len(lengths), heads, 128).bfloat16().to(device),
        torch.randn(len(lengths), heads).to(device),
        cache.to(device),
        table.to(device),
        torch.tensor(lengths, device=device),
        torch.tensor(requests, device=device),
        keys,
    )


@BOTH
@pytest.mark.parametrize("heads", [64, 32, 5])
def test_rows_of_different_requests_and_lengths(device: str, scores: Scores, heads: int) -> None:
    """Lengths 0, 5 and 67 and page edges; keys past the length, on pages past it and between pages are NaN or
    foreign.
    """
    s = scene(device, [0, 5, 67, 300, 64, 63, 129], [0, 0, 1, 2, 2, 1, 2], [70, 129, 300], heads)
    s.assert_scored(scores(s.query, s.weight, s.cache, s.table, s.lengths, s.request))


@BOTH
def test_one_page_table_row_for_each_row(device: str, scores: Scores) -> None:
    s = scene(device, [0, 5, 67], [0, 1, 2], [3, 5, 70])
    s.assert_scored(scores(s.query, s.weight, s.cache, s.table.long(), s.lengths.int(), width=128))


def test_every_column_is_written_over_any_poison(device: str) -> None:
    """With a fill no column keeps what memory held, so a consumer that scans the padded row finds nothing in it."""
    s = scene(device, [0, 5, 67], [0, 1, 2], [3, 5, 70])
    out = torch.full((3, 128), math.nan, device=device)
    paged_scores(s.query, s.weight, s.cache, s.table, s.lengths, width=128, out=out)
    s.assert_scored(out)


@pytest.mark.parametrize("fill", [-math.inf, None])
def test_nothing_outside_out_is_written(device: str, fill: float | None) -> None:
    s = scene(device, [70, 5, 67, 0], [0, 1, 2, 2], [70, 5, 70])
    buffer = torch.full((6, 200), 1e30, device=device)
    out = buffer[1:5, 16:86]
    paged_scores(s.query, s.weight, s.cache, s.table, s.lengths, s.request, width=70, out=out, fill=fill)
    s.assert_scored(out, 1e30 if fill is None else fill)
    out.fill_(1e30)
    assert (buffer == 1e30).all()


def test_lengths_outside_the_row_are_clamped(device: str) -> None:
    """Multi-token steps and padded graph rows give ends such as -4..1, or 4,294,967,292 when read as unsigned."""
    s = scene(device, [-4, -1, 0, 1, 2, 66, 4_294_967_292], [0] * 7, [66])
    got = paged_scores(s.query, s.weight, s.cache, s.table, s.lengths, s.request, width=66)
    s.lengths = s.lengths.clamp(0, 66)
    s.assert_scored(got)


@pytest.mark.parametrize("pattern", ["entry number", "channel number"])
def test_a_page_is_read_entry_by_entry(device: str, pattern: str) -> None:
    """Keys that count entries, or channels: a tiled or transposed read gives other scores."""
    entry, channel = torch.arange(64.0)[:, None].expand(-1, 128), torch.arange(128.0).expand(64, -1)
    key = (entry if pattern == "entry number" else channel).bfloat16().contiguous()
    cache = empty_cache(2, fill=POISON_BYTE)
    write_slots(cache, torch.arange(64, 128), key)
    query = torch.zeros(1, 64, 128, dtype=torch.bfloat16)
    query[0, 0, 77] = 1
    table, length = torch.tensor([[1]], dtype=torch.int32), torch.tensor([64])
    arguments = (query, torch.ones(1, 64), cache, table, length)
    got = paged_scores(*(argument.to(device) for argument in arguments))
    assert torch.equal(got[0].cpu(), key[:, 77].float())


@pytest.mark.parametrize("page", [0, 131_071, 131_072, 262_144])
def test_page_offsets_are_64_bit(device: str, page: int) -> None:
    s = scene(device, [64], [0], [64])
    cache = empty_cache(262_145, device)
    write_slots(cache, page * PAGE_ENTRIES + torch.arange(64, device=device), s.keys[0].to(device))
    s.table[0, 0] = page
    s.assert_scored(paged_scores(s.query, s.weight, cache, s.table, s.lengths))


def test_relu_comes_before_the_weight(device: str) -> None:
    """A negative product times a negative weight counts nothing."""
    s = scene(device, [3], [0], [3])
    s.query = torch.zeros_like(s.query)
    s.query[0, 0] = -(s.keys[0][1].to(device))
    s.weight.fill_(-1.0)
    got = paged_scores(s.query, s.weight, s.cache, s.table, s.lengths)
    assert got[0, 1] == 0


def test_repeated_runs_are_bitwise_equal(device: str) -> None:
    s = scene(device, [300, 67, 5], [0, 1, 2], [300, 70, 5])
    first = paged_scores(s.query, s.weight, s.cache, s.table, s.lengths)
    for _ in range(20 if device == "cuda" else 2):
        assert torch.equal(paged_scores(s.query, s.weight, s.cache, s.table, s.lengths), first)


def test_a_row_does_not_depend_on_its_neighbours(device: str) -> None:
    s = scene(device, [300, 67, 5, 299], [0, 1, 2, 0], [300, 70, 5])
    together = paged_scores(s.query, s.weight, s.cache, s.table, s.lengths, s.request, width=300)
    for row in range(4):
        one = slice(row, row + 1)
        alone = paged_scores(s.query[one], s.weight[one], s.cache, s.table, s.lengths[one], s.request[one], width=300)
        assert torch.equal(alone[0], together[row])


@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 2**31), power=st.integers(-8, 8))
def test_pages_heads_and_scale_may_be_permuted(seed: int, power: int) -> None:
    """Moving pages changes nothing; a weight times 2^n gives the score times 2^n; head order costs only rounding."""
    torch.manual_seed(seed)
    s = scene("cpu", [130, 67], [0, 1], [130, 70])
    base = paged_scores(s.query, s.weight, s.cache, s.table, s.lengths, s.request)
    moved = torch.randperm(len(s.cache))
    cache, table = s.cache[moved.argsort()], torch.where(s.table < 0, -1, moved[s.table.long()].int())
    assert torch.equal(paged_scores(s.query, s.weight, cache, table, s.lengths, s.request), base)
    scaled = paged_scores(s.query, s.weight * 2.0**power, s.cache, s.table, s.lengths, s.request)
    assert torch.equal(scaled, base * 2.0**power)
    heads = torch.randperm(64)
    shuffled = paged_scores(
        s.query[:, heads].contiguous(), s.weight[:, heads].contiguous(), s.cache, s.table, s.lengths, s.request
    )
    s.assert_scored(shuffled)


def test_no_rows_no_width_and_refused_operands() -> None:
    s = scene("cpu", [3], [0], [3])
    assert paged_scores(s.query[:0], s.weight[:0], s.cache, s.table, s.lengths[:0]).shape == (0, 0)
    assert paged_scores(s.query, s.weight, s.cache, s.table, s.lengths * 0).shape == (1, 0)
    with pytest.raises(ValueError, match="query is"):
        paged_scores(s.query.float(), s.weight, s.cache, s.table, s.lengths)
    with pytest.raises(ValueError, match="weight is"):
        paged_scores(s.query, s.weight.double(), s.cache, s.table, s.lengths)
    with pytest.raises(ValueError, match="page_table is"):
        paged_scores(s.query, s.weight, s.cache, s.table.float(), s.lengths)
    with pytest.raises(ValueError, match="lengths is"):
        paged_scores(s.query, s.weight, s.cache, s.table, s.lengths[:, None])
    with pytest.raises(ValueError, match="width 129 needs 3 pages"):
        paged_scores(s.query, s.weight, s.cache, s.table, s.lengths, width=129)
    with pytest.raises(ValueError, match="out is"):
        paged_scores(s.query, s.weight, s.cache, s.table, s.lengths, width=3, out=torch.empty(1, 4))


@pytest.mark.parametrize("next_n", [2, 3])
def test_rows_of_one_step_share_a_request(device: str, next_n: int) -> None:
    """Speculative decoding: next_n rows a request, each with its own length; without `request` the table has one row
    each.
    """
    lengths = [70 - next_n + i + 1 for i in range(next_n)] + [max(0, 2 - next_n + i) for i in range(next_n)]
    s = scene(device, lengths, [0] * next_n + [1] * next_n, [70, 5])
    tile = Tile(group=next_n, programs=1) if next_n == 2 else None
    s.assert_scored(paged_scores(s.query, s.weight, s.cache, s.table, s.lengths, next_n=next_n, tile=tile))
    s.assert_scored(paged_scores(s.query, s.weight, s.cache, s.table, s.lengths, s.request, next_n=next_n))


@pytest.mark.parametrize("rows", [3, 9])
@pytest.mark.parametrize("paged", [True, False], ids=["paged", "contiguous"])
@pytest.mark.parametrize("group", [1, 2, 4])
def test_a_prefill_shares_keys_among_its_rows(device: str, rows: int, paged: bool, group: int) -> None:
    """Causal rows of one request, in tiles that the rows do not fill; keys past the last length are NaN."""
    s = scene(device, [64 * row // rows * 5 + 1 for row in range(rows)], [0] * rows, [400])
    tile = Tile(group=group, stages=3, programs=0, split=2)
    if paged:
        got = paged_scores(s.query, s.weight, s.cache, s.table, s.lengths, s.request, next_n=rows, tile=tile)
    else:
        keys = s.keys[0].to(device).clone()
        keys[int(s.lengths.max()) :] = math.nan
        got = contiguous_scores(s.query, s.weight, keys, s.lengths, tile=tile)
    s.assert_scored(got)


@pytest.mark.parametrize("programs", [1, 3])
@pytest.mark.parametrize("keys", [64, 128])
def test_every_schedule_gives_the_same_bits(device: str, programs: int, keys: int) -> None:
    """Shares that end within a row, rows without entries, more programs than blocks: all equal one program a row."""
    s = scene(device, [0, 130, 0, 0, 300, 64, 1], [0, 1, 2, 0, 2, 1, 0], [1, 130, 300])
    arguments = (s.query, s.weight, s.cache, s.table, s.lengths, s.request)
    base = paged_scores(*arguments, tile=Tile(keys=keys, programs=0, split=1 << 20))
    s.assert_scored(base)
    assert torch.equal(paged_scores(*arguments, tile=Tile(keys=keys, programs=programs)), base)
    assert torch.equal(paged_scores(*arguments, tile=Tile(keys=keys, programs=0, split=1)), base)


def test_all_rows_empty(device: str) -> None:
    s = scene(device, [0] * 33, [0] * 33, [3])
    out = torch.full((33, 64), math.nan, device=device)
    paged_scores(s.query, s.weight, s.cache, s.table, s.lengths, s.request, width=64, out=out)
    assert (out == -math.inf).all()


@pytest.mark.gpu
def test_pages_through_descriptors() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here: descriptors are not interpreted")
    s = scene("cuda", [0, 5, 67, 300], [0, 0, 1, 2], [70, 129, 300])
    plain = paged_scores(s.query, s.weight, s.cache, s.table, s.lengths, s.request)
    tile = Tile(descriptor=True)
    assert torch.equal(paged_scores(s.query, s.weight, s.cache, s.table, s.lengths, s.request, tile=tile), plain)


@pytest.mark.gpu
def test_graph_replay_equals_eager_and_allocates_only_scores() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here: there are no graphs to capture")
    s = scene("cuda", [300, 67, 5, 0], [0, 1, 2, 2], [300, 70, 5])
    eager = paged_scores(s.query, s.weight, s.cache, s.table, s.lengths, s.request, width=300)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    again = paged_scores(s.query, s.weight, s.cache, s.table, s.lengths, s.request, width=300)
    assert torch.cuda.max_memory_allocated() - before <= -(-again.numel() * 4 // 512) * 512
    out = torch.empty_like(eager)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        paged_scores(s.query, s.weight, s.cache, s.table, s.lengths, s.request, width=300, out=out)
    for _ in range(3):
        out.fill_(math.nan)
        graph.replay()
        assert torch.equal(out, eager)
    s.lengths.copy_(torch.tensor([5, 70, 4, 299]))
    s.request.copy_(torch.tensor([2, 1, 2, 0]))
    graph.replay()
    s.assert_scored(out)


def test_refused_tiles_and_runs() -> None:
    s = scene("cpu", [3, 3, 3, 3], [0, 0, 0, 0], [3])
    with pytest.raises(ValueError, match=r"tile.group 2 does not divide next_n 1"):
        paged_scores(s.query, s.weight, s.cache, s.table, s.lengths, s.request, tile=Tile(group=2))
    with pytest.raises(ValueError, match="next_n 3 does not divide the 4 rows"):
        paged_scores(s.query, s.weight, s.cache, s.table, s.lengths, s.request, next_n=3)
    with pytest.raises(ValueError, match="page_table has 1 rows for 2 requests"):
        paged_scores(s.query, s.weight, s.cache, s.table, s.lengths, next_n=2)
    with pytest.raises(ValueError, match="width 4 is more than the 3 keys"):
        contiguous_scores(s.query, s.weight, s.keys[0], s.lengths, width=4)
    with pytest.raises(ValueError, match="keys is"):
        contiguous_scores(s.query, s.weight, s.keys[0].float(), s.lengths)


def test_prefills_of_any_length_run_one_compiled_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Constants that a launch compiles into the kernel do not follow the number of rows."""
    seen: list[dict[str, object]] = []

    class Launches:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *arguments, **constants: seen.append(constants)

    monkeypatch.setattr("difftest.kernels.score.scores_kernel", Launches())
    for rows in (3, 8, 40):
        made = scene("cpu", [5] * rows, [0] * rows, [9])
        paged_scores(
            made.query,
            made.weight,
            made.cache,
            made.table,
            made.lengths,
            made.request,
            width=9,
            next_n=rows,
            tile=PREFILL,
        )
        contiguous_scores(made.query, made.weight, made.keys[0], made.lengths, width=9, tile=PREFILL)
    assert [len({str(constants) for constants in seen[start::2]}) for start in (0, 1)] == [1, 1]
