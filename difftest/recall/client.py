"""An HTTP client for OpenAI-compatible chat servers: retries with back-off, time limits, streaming or not."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import httpx
from httpx_sse import EventSource
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_attempt, wait_random_exponential

from .assemble import StreamParts, from_body, json_object, read_events
from .conversation import Answer, Message
from .failures import Failure, as_failure, from_status

CONNECT_SECONDS = 10.0


@dataclass(frozen=True)
class ServerOptions:
    """How one server is asked. Times in seconds.

    timeout   for a whole request.   stall_timeout  between two parts of a stream (the first one waits for the prefill).
    retries   attempts after the first.   backoff, backoff_max  bounds of the first and of the longest random wait
              between attempts; a longer Retry-After of the server is obeyed, up to `timeout`.
    extra     merged into every request body (`{"chat_template_kwargs": {"thinking": false}}`).
    """

    base_url: str
    model: str = ""
    api_key: str = ""
    timeout: float = 600.0
    stall_timeout: float = 120.0
    retries: int = 5
    backoff: float = 0.5
    backoff_max: float = 30.0
    stream: bool = True
    max_tokens: int = 256
    concurrency: int = 8
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Attempt:
    """One attempt of a request: when it started (Unix seconds), how long it took, what came of it (`ok` or a kind)."""

    started: float
    seconds: float
    outcome: str
    message: str = ""


@dataclass(frozen=True)
class Reply:
    """A server's answer to one request. `first_token` is None without streaming; seconds are the last attempt's."""

    answer: Answer
    usage: dict[str, Any]
    seconds: float
    first_token: float | None


def split_base_url(url: str) -> tuple[str, str]:
    """(root, API root) of a server: `http://host:30000` and `http://host:30000/v1` mean the same.

    ValueError for anything that is not an http(s) URL with a host.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is not a server address: give http://HOST:PORT, with or without /v1")
    root = url.rstrip("/")
    root = root.removesuffix("/chat/completions").removesuffix("/v1")
    return root, root + "/v1"


class GivenUp(Failure):
    """The request was not sent: an earlier one showed that this server answers none."""


class ChatClient:
    """Asks one server. Use as an async context manager; safe for many tasks at once, `concurrency` requests in flight.

    Produced by `serve.py` from the command line, consumed by the length fitting, the suite and the picks.
    """

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self.root, self.api = split_base_url(options.base_url)
        headers = {"authorization": f"Bearer {options.api_key}"} if options.api_key else {}
        reads = options.stall_timeout if options.stream else options.timeout
        self._http = httpx.AsyncClient(
            headers=headers,
            timeout=httpx.Timeout(options.timeout, connect=CONNECT_SECONDS, read=reads, pool=None),
            limits=httpx.Limits(max_connections=options.concurrency, max_keepalive_connections=options.concurrency),
            trust_env=urlsplit(self.root).hostname not in ("localhost", "127.0.0.1", "::1"),
        )
        self._gate = asyncio.Semaphore(options.concurrency)
        self.given_up = ""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def models(self) -> list[str]:
        """Names of the served models (GET /v1/models)."""
        body = await self.json("GET", self.api + "/models")
        return [str(entry["id"]) for entry in body.get("data") or () if isinstance(entry, dict) and "id" in entry]

    async def json(self, method: str, url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """One request whose answer is a JSON object; retried like a chat request. Raises the last `Failure`."""

        async def once() -> dict[str, Any]:
            response = await self._http.request(method, url, json=body, timeout=self.options.timeout)
            if response.is_error:
                raise from_status(response, response.text)
            return json_object(response.content)

        async with self._gate:
            got: dict[str, Any] = await self._with_retries(once, [])
        return got

    def body(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        """The body of a chat request: temperature 0 and whatever the options say."""
        body: dict[str, Any] = {
            "model": self.options.model,
            "messages": list(messages),
            "temperature": 0,
            "max_tokens": self.options.max_tokens,
            "stream": self.options.stream,
        }
        if self.options.stream:
            body["stream_options"] = {"include_usage": True}
        if tools:
            body["tools"] = list(tools)
        return {**body, **self.options.extra}

    async def ask(self, body: dict[str, Any], attempts: list[Attempt]) -> Reply:
        """Sends one chat request; every attempt is appended to `attempts`. Raises the last `Failure`.

        GivenUp, without asking, once `given_up` says why this server is asked no more.
        """
        url = self.api + "/chat/completions"
        once = self._streamed if body.get("stream") else self._whole
        async with self._gate:
            if self.given_up:
                raise GivenUp("given up", self.given_up, retry=False)
            reply: Reply = await self._with_retries(lambda: once(url, body), attempts)
        return reply

    async def _whole(self, url: str, body: dict[str, Any]) -> Reply:
        start = time.monotonic()
        response = await self._http.post(url, json=body)
        if response.is_error:
            raise from_status(response, response.text)
        answer, usage = from_body(json_object(response.content))
        return Reply(answer, usage, time.monotonic() - start, None)

    async def _streamed(self, url: str, body: dict[str, Any]) -> Reply:
        start, first = time.monotonic(), None
        async with self._http.stream("POST", url, json=body) as response:
            if response.is_error:
                raise from_status(response, (await response.aread()).decode(errors="replace"))
            if "text/event-stream" not in response.headers.get("content-type", ""):
                answer, usage = from_body(json_object(await response.aread()))
                return Reply(answer, usage, time.monotonic() - start, None)
            parts = StreamParts()
            async for _ in read_events(EventSource(response).aiter_sse(), parts):
                first = first or time.monotonic() - start
        return Reply(parts.answer(), parts.usage, time.monotonic() - start, first)

    async def _with_retries(self, once: Callable[[], Any], attempts: list[Attempt]) -> Any:
        options = self.options
        jitter = wait_random_exponential(multiplier=options.backoff, max=options.backoff_max)

        def wait(state: RetryCallState) -> float:
            error = state.outcome.exception() if state.outcome else None
            asked = error.wait if isinstance(error, Failure) and error.wait else 0.0
            return max(min(asked, options.timeout), jitter(state))

        retrying = AsyncRetrying(
            retry=retry_if_exception(lambda error: isinstance(error, Failure) and error.retry),
            stop=stop_after_attempt(1 + options.retries),
            wait=wait,
            reraise=True,
        )
        return await retrying(self._attempt, once, attempts)

    async def _attempt(self, once: Callable[[], Any], attempts: list[Attempt]) -> Any:
        started, start = time.time(), time.monotonic()

        try:
            async with asyncio.timeout(self.options.timeout):
                got = await once()
        except (Failure, httpx.HTTPError, TimeoutError, UnicodeDecodeError) as error:
            failure = as_failure(error)
            attempts.append(Attempt(started, time.monotonic() - start, failure.kind, str(failure)))
            raise failure from error
        attempts.append(Attempt(started, time.monotonic() - start, "ok"))
        return got
