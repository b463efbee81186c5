"""The whole command against live loopback servers: verdicts, exit codes, resuming, two servers, 64 at once."""

import asyncio
import json
import time
from collections import Counter
from pathlib import Path

import pytest
from chat_server import Behaviour, ChatServer
from rich.console import Console
from typer.testing import CliRunner, Result

from difftest.recall.cli import app
from difftest.recall.client import ServerOptions
from difftest.recall.journal import read_exchanges
from difftest.recall.serve import RunOptions, run

LENGTHS = 14
SHORT = ["--suite", "needle", "--length", "338", "--length", "2048", "--length", "2500"]


def serve(*words: str) -> Result:
    return CliRunner().invoke(app, ["serve", "--backoff", "0.001", *words])


def test_a_server_that_remembers_agrees(tmp_path: Path) -> None:
    with ChatServer() as server:
        result = serve("--base-url", server.url, "--out", str(tmp_path), "--max-length", "4600")
    assert result.exit_code == 0, result.output
    assert "server A, needle: all 15 remembered, up to 4,509 tokens" in result.output
    for suite in ("tools", "secret"):
        assert f"server A, {suite}: all 2 remembered" in result.output


def test_forgetting_is_reported_with_its_cliff(tmp_path: Path) -> None:
    lengths = [word for length in (338, 2048, 4509, 5294) for word in ("--length", str(length))]
    with ChatServer(Behaviour(forget_beyond=4600)) as server:
        result = serve("--base-url", server.url, "--out", str(tmp_path), "--suite", "needle", *lengths)
    assert result.exit_code == 1, result.output
    assert "1 of 12 missed, the first at 5,294 tokens; clean up to 4,509" in result.output
    assert "A needle/5294/start: miss:" in result.output


def test_a_model_that_fails_its_controls_cannot_be_judged(tmp_path: Path) -> None:
    with ChatServer(Behaviour(forget_beyond=20)) as server:
        result = serve("--base-url", server.url, "--out", str(tmp_path), *SHORT)
    assert result.exit_code == 125, result.output
    assert "cannot judge: 6 of 6 missed at 2,048 tokens or fewer" in result.output


def test_lengths_that_exercise_no_selection_are_no_pass(tmp_path: Path) -> None:
    with ChatServer() as server:
        result = serve("--base-url", server.url, "--out", str(tmp_path), "--suite", "needle", "--length", "338")
    assert result.exit_code == 125, result.output
    assert "selection not exercised" in result.output


def test_a_prompt_beyond_the_context_is_left_out(tmp_path: Path) -> None:
    with ChatServer(Behaviour(context=2600, tokenize_endpoint=False)) as server:
        result = serve("--base-url", server.url, "--out", str(tmp_path), *SHORT, "--length", "4000")
    assert result.exit_code == 0, result.output
    assert "needle/4000 is left out" in result.output


def test_no_server_cannot_be_judged(tmp_path: Path) -> None:
    result = serve("--base-url", "http://127.0.0.1:9", "--out", str(tmp_path))
    assert result.exit_code == 125
    assert "server A at http://127.0.0.1:9 gives no model list" in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--base-url", "host:1"], "is not a server address"),
        (["--base-url", "http://h", "--suite", "nedle"], "unknown suite 'nedle': choose from"),
        (["--base-url", "http://h", "--length", "-3"], "token counts of at least 1"),
        (["--base-url", "http://h", "--extra-body", "{"], "--extra-body is not JSON"),
        (["--base-url", "http://h", "--extra-body", "[1]"], "is a JSON list, not an object"),
    ],
)
def test_bad_usage_is_one_sentence(words: list[str], message: str) -> None:
    result = serve(*words)
    assert result.exit_code == 2
    assert message in result.output
    assert len(result.output.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("behaviour", "words", "code", "message"),
    [
        (Behaviour(models=("a", "b")), [], 2, "server A serves a, b; choose one with --model"),
        (Behaviour(), ["--model", "other"], 2, "does not serve 'other'; it serves tiny"),
        (Behaviour(api_key="k"), [], 125, "wrong key"),
        (Behaviour(tokenize_endpoint=False), ["--count", "endpoint"], 2, "use --count usage"),
        (Behaviour(tokenize_endpoint=False, usage=False), [], 125, "give --tokenizer"),
        (Behaviour(), ["--length", "20"], 2, "choose a longer length than 20"),
    ],
)
def test_what_a_server_does_not_offer_is_one_sentence(
    tmp_path: Path, behaviour: Behaviour, words: list[str], code: int, message: str
) -> None:
    with ChatServer(behaviour) as server:
        result = serve("--base-url", server.url, "--out", str(tmp_path), "--suite", "needle", *words)
    assert result.exit_code == code, result.output
    assert message in result.output


def test_64_at_once_with_failures_lose_and_double_nothing(tmp_path: Path) -> None:
    """Every twentieth request fails, in turn in six ways. Every record is there once, and is an answer."""
    kinds = ["429", "500", "malformed", "hang up", "503", "no choices"]

    def fault(number: int) -> str:
        time.sleep(0.25)
        return kinds[number // 20 % len(kinds)] if number % 20 == 0 else ""

    server_options = {"concurrency": 64, "backoff": 0.001, "backoff_max": 0.01}
    with ChatServer(Behaviour(fault=fault)) as server:
        options = RunOptions(
            (ServerOptions(server.url, **server_options),),  # type: ignore[arg-type]
            tmp_path,
            ("needle", "secret", "tools", "config"),
            tuple(range(450, 450 + LENGTHS)),
        )
        quiet = Console(quiet=True)
        asyncio.run(run(options, quiet, quiet))
    _, exchanges = read_exchanges(tmp_path / "exchanges.jsonl")
    keys = Counter(exchange.key for exchange in exchanges)
    turns = LENGTHS * (3 + 6 + 5 + 3)
    assert len(keys) == turns == len(exchanges)
    assert {exchange.status for exchange in exchanges} == {"answered"}
    failed = [attempt for exchange in exchanges for attempt in exchange.attempts if attempt.outcome != "ok"]
    assert server.number == turns + len(failed)
    assert len(failed) / turns > 0.045
    assert {attempt.outcome for attempt in failed} >= {"http 429", "http 500", "malformed", "broken stream"}
    assert 48 < server.most_at_once <= 64


def test_an_interrupted_run_resumes_without_asking_twice(tmp_path: Path) -> None:
    with ChatServer(Behaviour(fault=lambda number: "500" if number > 5 else "")) as server:
        words = ["--base-url", server.url, "--out", str(tmp_path), *SHORT]
        first = serve(*words, "--retries", "0", "--concurrency", "1")
        assert first.exit_code == 125, first.output
        assert "4 of 9 conversations have no answer" in first.output
        server.behaviour.fault = lambda number: ""
        before = [json.dumps(request) for request in server.requests[:5]]
        second = serve(*words, "--retries", "0")
        assert second.exit_code == 0, second.output
        asked = [json.dumps(request) for request in server.requests[9:]]
        assert len(asked) == 4
        assert not set(asked) & set(before)
        third = serve(*words)
    assert third.exit_code == 0
    assert len(server.requests) == 13


def test_two_servers_are_compared_side_by_side(tmp_path: Path) -> None:
    with ChatServer() as good, ChatServer(Behaviour(forget_beyond=2400)) as bad:
        result = serve("--base-url", good.url, "--against", bad.url, "--out", str(tmp_path), *SHORT)
    assert result.exit_code == 1, result.output
    assert "ok / MISS" in result.output
    assert "A and B: 9 compared, missed by A only 0, by B only 1, by both 0" in result.output
    assert "word for word the same answers in 8" in result.output


def test_without_streaming(tmp_path: Path) -> None:
    with ChatServer() as server:
        result = serve("--base-url", server.url, "--out", str(tmp_path), *SHORT, "--no-stream")
        assert not any(request["stream"] for request in server.requests)
    assert result.exit_code == 0, result.output


def test_a_server_that_vanishes_is_said_and_the_run_ends(tmp_path: Path) -> None:
    with ChatServer(Behaviour(fault=lambda number: "401" if number > 3 else "")) as server:
        result = serve("--base-url", server.url, "--out", str(tmp_path), *SHORT, "--concurrency", "1")
        assert len(server.requests) == 4
    assert result.exit_code == 125, result.output
    assert "server A stopped answering" in result.output
