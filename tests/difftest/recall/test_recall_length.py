"""Fitting prompts to token lengths, with counters of different slopes and with a live server's own counts."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from chat_server import Behaviour, ChatServer, token_ids

from difftest.recall.client import ChatClient, ServerOptions
from difftest.recall.length import SLACK, SLACK_TOKENS, choose_counter, fit
from difftest.recall.plan import PLANS, lengths_up_to
from difftest.recall.suites.needle import needle


class SlopeCounter:
    """Tokens = overhead + slope * words."""

    def __init__(self, slope: float, overhead: int = 10) -> None:
        self.slope, self.overhead, self.calls = slope, overhead, 0

    async def count(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> int:
        self.calls += 1
        return self.overhead + int(self.slope * sum(len(str(message.get("content")).split()) for message in messages))


@pytest.mark.parametrize("slope", [0.9, 1.3, 2.7])
@pytest.mark.parametrize("length", [338, 22597])
def test_needle_prompts_come_out_just_under_the_length(slope: float, length: int) -> None:
    counter = SlopeCounter(slope)
    words, tokens = asyncio.run(fit(lambda count: needle(0, length, "middle", count), length, counter))
    assert length - max(SLACK_TOKENS, SLACK * length) <= tokens <= length
    assert counter.calls <= 5
    assert words > 0


@pytest.mark.parametrize("suite", list(PLANS))
def test_every_suite_can_be_fitted_and_is_never_too_long(suite: str) -> None:
    plan, counter = PLANS[suite], SlopeCounter(1.4)  # type: ignore[index]
    length = plan.lengths[-1]
    _, tokens = asyncio.run(fit(lambda count: plan.build(0, length, plan.depths[0], count), length, counter))
    assert 0.98 * length <= tokens <= length


def test_an_impossible_length_is_named() -> None:
    with pytest.raises(ValueError, match="choose a longer length than 20"):
        asyncio.run(fit(lambda count: needle(0, 20, "middle", count), 20, SlopeCounter(1.0)))


@pytest.mark.parametrize(("endpoint", "name"), [(True, "endpoint"), (False, "usage")])
def test_the_server_counts(endpoint: bool, name: str) -> None:
    talk = needle(0, 300, "middle", 100)

    async def count(url: str) -> tuple[int, str]:
        async with ChatClient(ServerOptions(url, "tiny", retries=0)) as client:
            counter, by = await choose_counter("auto", client, "")
            return await counter.count(talk.messages(0), ()), by

    with ChatServer(Behaviour(tokenize_endpoint=endpoint)) as server:
        assert asyncio.run(count(server.url)) == (len(token_ids(talk.messages(0))), name)


def test_needle_lengths_go_on_by_doubling() -> None:
    assert lengths_up_to("needle", 100_000)[-4:] == (22597, 32768, 65536, 100_000)
    assert lengths_up_to("needle", 5000)[-1] == 4509
    assert lengths_up_to("config", 100_000) == (1500, 8000, 12000)
