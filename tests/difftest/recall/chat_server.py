"""A chat server on loopback that speaks the OpenAI protocol, answers from the prompt, and misbehaves on request.

It reads with its own rules (a word or a number is one token) and knows nothing of the client's code.
"""

import base64
import json
import re
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

TEMPLATE_TOKENS = 4
"""Tokens this server's chat template adds to a message."""


def tokenize(text: str) -> list[str]:
    return re.findall(r"\w+|[^\w\s]", text)


def render(messages: list[dict[str, Any]]) -> str:
    parts = []
    for message in messages:
        calls = json.dumps(message["tool_calls"]) if message.get("tool_calls") else ""
        parts.append(f"<{message['role']}> {message.get('content') or ''} {calls}")
    return "\n".join(parts)


def remembered(prompt: str, forget_beyond: int) -> str:
    """The part of the prompt within `forget_beyond` tokens of its end."""
    found = list(re.finditer(r"\w+|[^\w\s]", prompt))
    return prompt if len(found) <= forget_beyond else prompt[found[-forget_beyond].start() :]


def answer(messages: list[dict[str, Any]], tools: list[Any], forget_beyond: int) -> tuple[str, list[dict[str, Any]]]:
    """(content, tool calls) by plain text search in what is remembered."""
    text = remembered(render(messages), forget_beyond)
    last = messages[-1]
    question = str(last["content"]) if last["role"] == "user" else ""
    if last["role"] == "user" and "Read its log" in question and tools:
        machine = re.search(r"part of the (\w+ \w+) have", question)
        call = {"name": "read_log", "arguments": json.dumps({"machine": machine.group(1) if machine else ""})}
        return "", [{"id": "call_x", "type": "function", "function": call}]
    if last["role"] == "tool":
        return found(r"serial number (\d+)", str(last["content"]), forget_beyond), []
    if "Keep it" in question:
        return "OK", []
    if "secret that I told" in question:
        return found(r"secret is the (word \w+ and the number \d+)", text, 0), []
    if named := re.search(r"access code of the (\w+ \w+)\?", question):
        return found(rf"access code of the {named.group(1)} is (\d+)", text, 0), []
    if named := re.search(r"badge of the (\w+ \w+) is (\d+)\.", question):
        return found(rf"badge of the {named.group(1)} is (\d+)", text, 0), []
    if named := re.search(r"the part of the (\w+ \w+) had?", question):
        return found(rf"part of the {named.group(1)} has serial number (\d+)", text, 0), []
    if named := re.search(r"value of (\w+) in section ([\w.]+)\?", question):
        section = text.partition(f"[section {named.group(2)}]")[2].partition("[section")[0]
        return found(rf"{named.group(1)} = (\d+)", section, 0), []
    return "I do not know", []


def found(pattern: str, text: str, forget_beyond: int) -> str:
    match = re.search(pattern, remembered(text, forget_beyond) if forget_beyond else text)
    return match.group(1) if match else "I do not know"


@dataclass
class Behaviour:
    """What the server does wrong. `fault(number)` names the fault of the request with that number, or is empty."""

    forget_beyond: int = 10**9
    context: int = 10**9
    fault: Callable[[int], str] = lambda number: ""
    tokenize_endpoint: bool = True
    usage: bool = True
    models: tuple[str, ...] = ("tiny",)
    api_key: str = ""
    retry_after: str = ""
    stall_seconds: float = 5.0
    picks: Callable[[int], Any] | None = None


@dataclass
class ChatServer:
    """Use as a context manager; `url` is its address, `requests` the chat bodies it received."""

    behaviour: Behaviour = field(default_factory=Behaviour)
    requests: list[dict[str, Any]] = field(default_factory=list)
    most_at_once: int = 0

    def __enter__(self) -> Self:
        self._lock, self._now, self.number = threading.Lock(), 0, 0
        owner = self

        class Handler(_Handler):
            server_state = owner

        class Server(ThreadingHTTPServer):
            request_queue_size = 128
            daemon_threads = True

        self._http = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        threading.Thread(target=lambda: self._http.serve_forever(poll_interval=0.02), daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._http.shutdown()
        self._http.server_close()

    def begin(self, body: dict[str, Any]) -> int:
        with self._lock:
            self.requests.append(body)
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
            self.number += 1
            return self.number

    def end(self) -> None:
        with self._lock:
            self._now -= 1


class _Handler(BaseHTTPRequestHandler):
    server_state: ChatServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def reply(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        behaviour = self.server_state.behaviour
        if behaviour.api_key and self.headers.get("authorization") != f"Bearer {behaviour.api_key}":
            return self.reply(401, {"error": {"message": "wrong key"}})
        self.reply(200, {"object": "list", "data": [{"id": name} for name in behaviour.models]})

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers["content-length"]))
        body, behaviour = json.loads(raw), self.server_state.behaviour
        if self.path == "/tokenize":
            if not behaviour.tokenize_endpoint:
                return self.reply(404, {"detail": "Not Found"})
            return self.reply(200, {"tokens": token_ids(body["messages"])})
        if self.path == "/generate":
            return self.generate(body)
        number = self.server_state.begin(body)
        try:
            self.chat(body, behaviour.fault(number))
        except (BrokenPipeError, ConnectionResetError):
            pass
        finally:
            self.server_state.end()

    def generate(self, body: dict[str, Any]) -> None:
        picks, tokens = self.server_state.behaviour.picks, len(body["input_ids"])
        meta: dict[str, Any] = {"prompt_tokens": tokens, "completion_tokens": 1}
        if picks and body.get("return_indexer_topk"):
            meta["indexer_topk"] = base64.b64encode(picks(tokens).astype("<i4").tobytes()).decode()
        self.reply(200, {"text": "", "meta_info": meta})

    def chat(self, body: dict[str, Any], fault: str) -> None:
        behaviour = self.server_state.behaviour
        tokens = len(token_ids(body["messages"]))
        if tokens > behaviour.context:
            return self.reply(400, {"error": {"message": f"{tokens} tokens exceed the maximum context length"}})
        if fault.isdigit():
            headers = {"retry-after": behaviour.retry_after} if behaviour.retry_after else {}
            return self.reply(int(fault), {"error": {"message": f"told to say {fault}"}}, headers)
        if fault == "malformed":
            return self.reply(200, b'{"choices": [{"message": {"con')
        if fault == "no choices":
            return self.reply(200, {"object": "chat.completion", "choices": []})
        if fault == "stall":
            time.sleep(behaviour.stall_seconds)
        if fault == "hang up":
            self.close_connection = True
            return self.connection.shutdown(socket.SHUT_RDWR)
        content, calls = answer(body["messages"], body.get("tools") or [], behaviour.forget_beyond)
        usage = (
            {"prompt_tokens": tokens, "completion_tokens": 3, "total_tokens": tokens + 3} if behaviour.usage else None
        )
        if body.get("stream"):
            return self.stream(content, calls, usage, fault)
        message = {"role": "assistant", "content": content, "tool_calls": calls or None}
        reason = "tool_calls" if calls else "stop"
        self.reply(200, {"choices": [{"index": 0, "message": message, "finish_reason": reason}], "usage": usage})

    def stream(self, content: str, calls: list[dict[str, Any]], usage: Any, fault: str) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream; charset=utf-8")
        self.send_header("connection", "close")
        self.end_headers()
        self.close_connection = True

        def event(delta: dict[str, Any], reason: str | None = None) -> None:
            body = {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}
            self.wfile.write(f"data: {json.dumps(body)}\n\n".encode())

        event({"role": "assistant", "content": ""})
        self.wfile.write(b": keep-alive\n\n")
        for call in calls:
            function = call["function"]
            event({"tool_calls": [{"index": 0, "id": call["id"], "function": {"name": function["name"]}}]})
            for start in range(0, len(function["arguments"]), 7):
                piece = {"index": 0, "function": {"arguments": function["arguments"][start : start + 7]}}
                event({"tool_calls": [piece]})
        for number, piece in enumerate(re.findall(r"..?", content)):
            event({"content": piece})
            if fault == "broken stream" and number == 0:
                return
            if fault == "stalled stream" and number == 0:
                self.wfile.flush()
                time.sleep(self.server_state.behaviour.stall_seconds)
            if fault == "bad event" and number == 0:
                self.wfile.write(b'data: {"choices": [\n\n')
            if fault == "error event" and number == 0:
                self.wfile.write(b'data: {"error": {"message": "out of memory"}}\n\n')
        event({}, "tool_calls" if calls else "stop")
        if usage:
            self.wfile.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")


def token_ids(messages: list[dict[str, Any]]) -> list[int]:
    """Stable ids of the rendered chat; the template's tokens are 0."""
    words = tokenize(render(messages))
    return [0] * (TEMPLATE_TOKENS * len(messages)) + [1 + sum(word.encode()) * 31 % 50021 for word in words]
