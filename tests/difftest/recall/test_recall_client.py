"""The HTTP client against every misbehaviour a server has shown, streaming and not."""

import asyncio
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import pytest
from chat_server import Behaviour, ChatServer

from difftest.recall.client import Attempt, ChatClient, Reply, ServerOptions, split_base_url
from difftest.recall.failures import Failure, retry_after
from difftest.recall.suites.needle import needle
from difftest.recall.suites.tools import tools

FAST = {"backoff": 0.001, "backoff_max": 0.01}
TALK = needle(0, 200, "middle", 60)
CODE = TALK.turns[0].expect.contains[0]


def ask(behaviour: Behaviour, **options: Any) -> tuple[Reply | Failure, list[Attempt], ChatServer]:
    """Asks a server of that behaviour the needle question once; returns the reply or the last failure."""

    async def once(url: str) -> tuple[Reply | Failure, list[Attempt]]:
        attempts: list[Attempt] = []
        async with ChatClient(ServerOptions(url, "tiny", **{**FAST, **options})) as client:
            try:
                return await client.ask(client.body(TALK.messages(0)), attempts), attempts
            except Failure as failure:
                return failure, attempts

    with ChatServer(behaviour) as server:
        return *asyncio.run(once(server.url)), server


def first_times(count: int, fault: str) -> Callable[[int], str]:
    return lambda number: fault if number <= count else ""


@pytest.mark.parametrize("stream", [True, False])
def test_a_healthy_server_answers_at_once(stream: bool) -> None:
    reply, attempts, server = ask(Behaviour(), stream=stream)
    assert isinstance(reply, Reply)
    assert CODE in reply.answer.content
    assert reply.answer.finish_reason == "stop"
    assert reply.usage["prompt_tokens"] > 60
    assert [attempt.outcome for attempt in attempts] == ["ok"]
    assert (reply.first_token is not None) is stream
    assert server.requests[0]["temperature"] == 0


FAULTS = [
    ("429", "http 429", True),
    ("500", "http 500", True),
    ("503", "http 503", False),
    ("malformed", "malformed", True),
    ("malformed", "malformed", False),
    ("no choices", "malformed", False),
    ("hang up", "broken stream", True),
    ("hang up", "broken stream", False),
    ("broken stream", "broken stream", True),
    ("bad event", "malformed", True),
    ("error event", "broken stream", True),
]


@pytest.mark.parametrize(("fault", "kind", "stream"), FAULTS)
def test_passing_faults_are_retried(fault: str, kind: str, stream: bool) -> None:
    reply, attempts, _ = ask(Behaviour(fault=first_times(2, fault)), stream=stream)
    assert isinstance(reply, Reply)
    assert CODE in reply.answer.content
    assert [attempt.outcome for attempt in attempts] == [kind, kind, "ok"]


def test_lasting_faults_are_given_up_after_the_retries() -> None:
    failure, attempts, server = ask(Behaviour(fault=lambda number: "500"), retries=3)
    assert isinstance(failure, Failure)
    assert "told to say 500" in str(failure)
    assert len(attempts) == len(server.requests) == 4


@pytest.mark.parametrize(("fault", "stream"), [("stall", False), ("stall", True), ("stalled stream", True)])
def test_a_stall_ends_at_its_limit_and_is_retried(fault: str, stream: bool) -> None:
    limits = {"stall_timeout": 0.2} if stream else {"timeout": 0.2}
    start = time.monotonic()
    reply, attempts, _ = ask(Behaviour(fault=first_times(1, fault), stall_seconds=3.0), stream=stream, **limits)
    assert isinstance(reply, Reply)
    assert attempts[0].outcome in ("stalled", "timeout")
    assert time.monotonic() - start < 2.0


def test_the_servers_wait_is_obeyed() -> None:
    start = time.monotonic()
    reply, _, _ = ask(Behaviour(fault=first_times(1, "429"), retry_after="0.3"))
    assert isinstance(reply, Reply)
    assert time.monotonic() - start >= 0.3


@pytest.mark.parametrize("status", ["400", "404", "422"])
def test_a_refusal_is_not_retried(status: str) -> None:
    failure, attempts, _ = ask(Behaviour(fault=lambda number: status))
    assert isinstance(failure, Failure)
    assert not failure.retry
    assert len(attempts) == 1


def test_a_prompt_beyond_the_context_is_recognised() -> None:
    failure, _, _ = ask(Behaviour(context=10))
    assert isinstance(failure, Failure)
    assert failure.too_long


def test_no_server_is_unreachable() -> None:
    async def once() -> list[Attempt]:
        attempts: list[Attempt] = []
        async with ChatClient(ServerOptions("http://127.0.0.1:9", "tiny", retries=1, **FAST)) as client:
            with pytest.raises(Failure, match="no server answers"):
                await client.ask(client.body(TALK.messages(0)), attempts)
        return attempts

    assert [attempt.outcome for attempt in asyncio.run(once())] == ["unreachable", "unreachable"]


@pytest.mark.parametrize("stream", [True, False])
def test_tool_calls_are_put_together(stream: bool) -> None:
    talk = tools(0, 400, "continuation", 60)

    async def once(url: str) -> Reply:
        async with ChatClient(ServerOptions(url, "tiny", stream=stream)) as client:
            return await client.ask(client.body(talk.messages(0), talk.tools), [])

    with ChatServer() as server:
        answer = asyncio.run(once(server.url)).answer
    call = answer.tool_calls[0]["function"]
    assert call["name"] == "read_log"
    assert talk.turns[0].expect.arguments["machine"] in call["arguments"]
    assert answer.finish_reason == "tool_calls"


@pytest.mark.parametrize(
    "url",
    ["http://host:1", "http://host:1/", "http://host:1/v1", "http://host:1/v1/", "http://host:1/v1/chat/completions"],
)
def test_base_urls_mean_the_same(url: str) -> None:
    assert split_base_url(url) == ("http://host:1", "http://host:1/v1")


@pytest.mark.parametrize("url", ["host:8000", "", "ftp://host", "http://"])
def test_what_is_no_address_is_named(url: str) -> None:
    with pytest.raises(ValueError, match="is not a server address"):
        split_base_url(url)


def test_retry_after_reads_seconds_and_dates() -> None:
    assert retry_after("2.5") == 2.5
    assert retry_after("Wed, 21 Oct 2015 07:28:00 GMT") == 0.0
    assert retry_after("soon") is None
    assert retry_after(None) is None


def test_extra_fields_reach_the_server() -> None:
    options = ServerOptions("http://host", "tiny", extra={"chat_template_kwargs": {"thinking": False}})
    body = ChatClient(dataclasses.replace(options, stream=False)).body(TALK.messages(0))
    assert body["chat_template_kwargs"] == {"thinking": False}
    assert "stream_options" not in body
