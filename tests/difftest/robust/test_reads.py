"""The robustness checks of reads: our kernels pass, and every check has a fault that it finds."""

import dataclasses
import math

import pytest
import torch
from difftest.kernels.layout import PAGE_ENTRIES, read_slots
from torch import Tensor

from difftest.robust.reads import Read, Scores, check, paged, reads
from difftest.robust.scene import Scene

COUNTS = (70, 5, 129)
RUNS = 5
CPU_CHECKS = {
    "exercised",
    "5 runs bitwise equal",
    "batch invariance",
    "poison unseen",
    "guards untouched",
}


def plain(s: Scene, out: Tensor) -> Tensor:
    """The scores by torch, one request at a time, -inf past each row's length."""
    out.fill_(-math.inf)
    for row in range(len(s.query)):
        request, count = row // s.next_n, int(s.lengths[row])
        entry = torch.arange(count)
        page = s.table[request, entry // PAGE_ENTRIES].long()
        key = read_slots(s.cache, page * PAGE_ENTRIES + entry % PAGE_ENTRIES).float()
        out[row, :count] = ((key @ s.query[row].float().T).relu() * s.weight[row]).sum(1)
    return out


def failed(scores: Scores) -> dict[str, str]:
    return {v.rule: v.why for v in check(Read("planted", COUNTS, 1, scores), "cpu", RUNS) if v.answer == "bug"}


def test_a_right_read_passes_every_check() -> None:
    found = list(check(Read("plain", COUNTS, 1, plain), "cpu", RUNS))
    assert {v.rule for v in found} == CPU_CHECKS
    assert {v.answer for v in found} == {"agrees"} and {v.exit_code for v in found} == {0}


@pytest.mark.parametrize("read", reads(), ids=lambda read: read.name)
def test_our_kernels_pass(read: Read) -> None:
    short = dataclasses.replace(
        read, counts=tuple(min(count, 130) for count in read.counts[:3]), next_n=min(read.next_n, 5)
    )
    assert [str(v) for v in check(short, "cpu", RUNS) if v.answer != "agrees"] == []


@pytest.mark.gpu
@pytest.mark.parametrize("read", reads(), ids=lambda read: read.name)
def test_our_kernels_pass_on_a_gpu(read: Read) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here: the compiled kernels are not run")
    found = list(check(read, "cuda"))
    assert [str(v) for v in found if v.answer != "agrees"] == []
    assert {v.rule for v in found} == {
        *CPU_CHECKS - {"5 runs bitwise equal"},
        "20 runs bitwise equal",
        "graph replay equals eager",
    }


def test_a_run_that_differs_from_the_first_is_named() -> None:
    runs = []

    def unsteady(s: Scene, out: Tensor) -> Tensor:
        plain(s, out)
        runs.append(0)
        if len(runs) == 4:
            out[2, 60] = torch.nextafter(out[2, 60], torch.tensor(math.inf))
        return out

    why = failed(unsteady)["5 runs bitwise equal"]
    assert why.startswith("run 3 and the first: 1 of 387 elements differ, the first at [2, 60]:")


def test_a_score_that_depends_on_the_batch_is_found() -> None:
    def batched(s: Scene, out: Tensor) -> Tensor:
        plain(s, out)
        return out.mul_(1 + 2.0**-20) if len(s.query) > 1 else out

    assert "request 0 alone and in its batch" in failed(batched)["batch invariance"]


@pytest.mark.parametrize("where", ["other page", "same page", "output"])
def test_a_read_of_memory_that_is_not_its_own_is_found(where: str) -> None:
    """A page that no request owns, the slots of a page behind the last key, and what the output held before."""

    def nosy(s: Scene, out: Tensor) -> Tensor:
        before = out[0, 0].clone()
        plain(s, out)
        if where == "output":
            out[0, 0] += before.nan_to_num() * 0 + before.isnan()
        else:
            owned = s.slots()
            free = torch.ones(len(s.cache) * PAGE_ENTRIES, dtype=torch.bool)
            free[owned] = False
            if where == "same page":
                free.view(-1, PAGE_ENTRIES)[free.view(-1, PAGE_ENTRIES).all(1)] = False
            stray = read_slots(s.cache, free.nonzero()[:1, 0]).float().sum()
            out[0, 0] += stray.nan_to_num(1.0).clamp(0, 1)
        return out

    assert "poison unseen" in failed(nosy)


def test_a_write_beside_the_output_is_found() -> None:
    def wide(s: Scene, out: Tensor) -> Tensor:
        plain(s, out)
        torch.as_strided(out, (1,), (1,), out.storage_offset() + out.shape[1])[0] = 0.0
        return out

    def loose(s: Scene, out: Tensor) -> Tensor:
        if out.is_contiguous():
            return plain(s, out)
        return wide(s, out)

    assert failed(loose) == {"guards untouched": "1 elements around the output were written, the first at [2, 193]"}


def test_nothing_scored_is_no_pass() -> None:
    def empty(s: Scene, out: Tensor) -> Tensor:
        return out.fill_(-math.inf)

    assert failed(empty)["exercised"] == "no score is finite"


def test_a_stray_page_is_followed_by_no_kernel_of_ours() -> None:
    """Guards around the page table name a page that no pool has; following one faults."""
    found = check(Read("decode", COUNTS, 1, paged()), "cpu", RUNS)
    assert {v.answer for v in found} == {"agrees"}

    def past_the_table(s: Scene, out: Tensor) -> Tensor:
        plain(s, out)
        page = torch.as_strided(s.table, (1,), (1,), s.table.storage_offset() + s.table.shape[1])
        out[0, 0] += read_slots(s.cache, page.long() * PAGE_ENTRIES).float().sum()
        return out

    with pytest.raises(IndexError):
        failed(past_the_table)
