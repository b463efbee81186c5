"""Random streams: one a name, of unit spread."""

import pytest
import torch
from difftest.cases.draw import Draw


def test_a_stream_depends_on_seed_and_name_only() -> None:
    first = Draw(5).normal("a", 100)
    draw = Draw(5)
    draw.normal("b", 7)
    draw.permutation("c", 9)
    assert torch.equal(draw.normal("a", 100), first)
    assert not torch.equal(draw.normal("b", 100), first)
    assert not torch.equal(Draw(6).normal("a", 100), first)


def test_spreads() -> None:
    draw = Draw(0)
    assert draw.normal("n", 100_000).std() == pytest.approx(1, abs=0.01)
    assert set(draw.signs("s", 1000).tolist()) == {-1.0, 1.0}
    assert sorted(draw.permutation("p", 50).tolist()) == list(range(50))
    tail = draw.student("t", 3, 100_000)
    assert tail.abs().max() > 10, "Student-t with 3 degrees has tails that no normal sample of this size has"
    assert tail.median().abs() < 0.02
