"""An `Answer` from a chat-completion body or from the events of a stream."""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from httpx_sse import ServerSentEvent

from .conversation import Answer
from .failures import SHOWN, Failure

DONE = "[DONE]"
REASONING_FIELDS = ("reasoning_content", "reasoning")
"""Names under which servers send the thinking part (SGLang and vLLM differ)."""


def malformed(what: str) -> Failure:
    return Failure("malformed", f"malformed response: {what}", retry=True)


def json_object(text: str | bytes) -> dict[str, Any]:
    """`text` as a JSON object; a retried `Failure` otherwise."""
    try:
        body = json.loads(text)
    except ValueError as error:
        start = text[:SHOWN].decode(errors="replace") if isinstance(text, bytes) else text[:SHOWN]
        raise malformed(f"not JSON ({error}), it begins {start[:60]!r}") from error
    if not isinstance(body, dict):
        raise malformed(f"a JSON {type(body).__name__} where an object belongs")
    return body


def _reasoning(message: dict[str, Any]) -> str:
    return next((str(message[name]) for name in REASONING_FIELDS if message.get(name)), "")


def from_body(body: dict[str, Any]) -> tuple[Answer, dict[str, Any]]:
    """(answer, usage) of a whole chat completion; a retried `Failure` names what it lacks."""
    try:
        choice = body["choices"][0]
        message = choice["message"]
        calls = tuple(message.get("tool_calls") or ())
        content = message.get("content") or ""
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise malformed(f"no choices[0].message ({type(error).__name__}: {error})") from error
    if not isinstance(content, str):
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    answer = Answer(content, _reasoning(message), calls, str(choice.get("finish_reason") or ""))
    return answer, body.get("usage") or {}


@dataclass
class StreamParts:
    """What a stream has delivered so far."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    finish_reason: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    events: int = 0
    done: bool = False

    def take(self, event: dict[str, Any]) -> bool:
        """Adds one event; True when it carried a token (for the time to the first one)."""
        self.events += 1
        if event.get("error"):
            detail = event["error"]
            text = detail.get("message", detail) if isinstance(detail, dict) else detail
            raise Failure(
                "broken stream", f"the server reported an error inside the stream: {str(text)[:SHOWN]}", retry=True
            )
        self.usage = event.get("usage") or self.usage
        token = False
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            for into, piece in ((self.content, delta.get("content")), (self.reasoning, _reasoning(delta))):
                if piece:
                    into.append(piece)
                    token = True
            for call in delta.get("tool_calls") or ():
                self._take_call(call)
                token = True
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
        return token

    def _take_call(self, piece: dict[str, Any]) -> None:
        call = self.calls.setdefault(
            int(piece.get("index") or 0), {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
        )
        call["id"] = piece.get("id") or call["id"]
        function = piece.get("function") or {}
        call["function"]["name"] += function.get("name") or ""
        call["function"]["arguments"] += function.get("arguments") or ""

    def answer(self) -> Answer:
        """The whole answer. A stream that ended without a finish reason was cut off: a retried `Failure`."""
        if not self.finish_reason:
            raise Failure(
                "broken stream", f"the stream ended after {self.events} events without a finish reason", retry=True
            )
        calls = tuple(self.calls[index] for index in sorted(self.calls))
        return Answer("".join(self.content), "".join(self.reasoning), calls, self.finish_reason)


async def read_events(events: AsyncIterator[ServerSentEvent], parts: StreamParts) -> AsyncIterator[None]:
    """Feeds a stream into `parts`, yielding after every event that carried a token; ends at [DONE] or with it."""
    async for event in events:
        if event.data.strip() == DONE:
            parts.done = True
            return
        if not event.data.strip():
            continue
        try:
            carried = parts.take(json_object(event.data))
        except (AttributeError, TypeError, ValueError) as error:
            raise malformed(f"an event of unexpected form ({error})") from error
        if carried:
            yield
