"""The record of a live run: one JSON line an exchange, resumable, never lost and never twice."""

import fcntl
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal, Self

from .client import Attempt
from .conversation import Answer, Expect

SCHEMA = "difftest.exchanges/1"
Status = Literal["answered", "refused", "failed"]


@dataclass(frozen=True)
class Exchange:
    """One request to one server, and what came of it.

    server   `A` (--base-url) or `B` (--against).   turn  number of the request within its conversation.
    digest   identifies the conversation's prompts.   prompt  tokens of the whole prompt, 0 when the server did not say.
    status   `answered`; `refused`: the server said no for good (`failure` says why); `failed`: all retries were spent.
    """

    server: str
    conversation: str
    turn: int
    suite: str
    length: int
    depth: str
    digest: str
    status: Status
    request: dict[str, Any]
    expect: Expect
    answer: Answer = field(default_factory=Answer)
    usage: dict[str, Any] = field(default_factory=dict)
    prompt: int = 0
    seconds: float = 0.0
    first_token: float | None = None
    attempts: tuple[Attempt, ...] = ()
    failure: str = ""
    too_long: bool = False

    @property
    def key(self) -> tuple[str, str, int]:
        return self.server, self.conversation, self.turn

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> "Exchange":
        expect, answer = dict(raw.pop("expect")), dict(raw.pop("answer"))
        for name in ("contains", "excludes"):
            expect[name] = tuple(expect[name])
        answer["tool_calls"] = tuple(answer["tool_calls"])
        attempts = tuple(Attempt(**attempt) for attempt in raw.pop("attempts"))
        return cls(**raw, expect=Expect(**expect), answer=Answer(**answer), attempts=attempts)


class Journal:
    """The exchanges of one run in `folder/exchanges.jsonl`. Use as a context manager; one process at a time.

    The first line holds the settings that decide the prompts; lines of kind `length` hold fitted lengths, so that a
    resumed run asks exactly the same prompts; the rest are exchanges. Opening an existing file drops a torn last line
    and failed exchanges (they are asked again) by an atomic rewrite. ValueError when the settings differ or the file is
    of another kind.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.file = folder / "exchanges.jsonl"
        self.settings = settings
        self.exchanges: dict[tuple[str, str, int], Exchange] = {}
        self.lengths: dict[str, dict[str, int]] = {}
        self._lines: IO[str] | None = None

    def __enter__(self) -> Self:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self._lock = (self.file.parent / ".lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise ValueError(
                f"{self.file.parent} is in use by another run; wait for it or give another --out"
            ) from error
        if self.file.exists():
            self._resume()
        self._rewrite()
        self._lines = self.file.open("a")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._lines:
            self._lines.close()
        self._lock.close()

    def _resume(self) -> None:
        header: dict[str, Any] = {}
        for raw in read_lines(self.file):
            kind = raw.pop("kind")
            if kind == "settings":
                header = raw["settings"]
            elif kind == "length":
                self.lengths[raw["cell"]] = {"words": raw["words"], "tokens": raw["tokens"]}
            elif raw["status"] != "failed":
                exchange = Exchange.from_dict(raw)
                self.exchanges[exchange.key] = exchange
        changed = sorted(name for name, value in self.settings.items() if header.get(name) != value)
        if changed:
            name = changed[0]
            was, now = header.get(name), self.settings[name]
            raise ValueError(f"{self.file} was recorded with {name} {was!r}, not {now!r}; give another --out")

    def _rewrite(self) -> None:
        part = self.file.with_suffix(".part")
        with part.open("w") as lines:
            lines.write(_line("settings", {"schema": SCHEMA, "settings": self.settings}))
            for cell, fitted in self.lengths.items():
                lines.write(_line("length", {"cell": cell, **fitted}))
            for exchange in self.exchanges.values():
                lines.write(_line("exchange", asdict(exchange)))
        part.replace(self.file)

    def _append(self, line: str) -> None:
        if self._lines is None:
            raise ValueError("the journal is not open")
        self._lines.write(line)
        self._lines.flush()

    def check(self, digests: dict[str, str]) -> None:
        """ValueError when a recorded conversation has other prompts than `digests` (by conversation) says."""
        for exchange in self.exchanges.values():
            if digests.get(exchange.conversation, exchange.digest) != exchange.digest:
                raise ValueError(f"{self.file} holds other prompts for {exchange.conversation}; give another --out")

    def add(self, exchange: Exchange) -> None:
        """Appends one exchange. ValueError if this request is already recorded."""
        if exchange.key in self.exchanges:
            raise ValueError(
                f"{exchange.conversation} turn {exchange.turn} of server {exchange.server} is recorded already"
            )
        self.exchanges[exchange.key] = exchange
        self._append(_line("exchange", asdict(exchange)))

    def add_length(self, cell: str, words: int, tokens: int) -> None:
        """Appends the filler that was fitted for a cell (`suite/length`)."""
        self.lengths[cell] = {"words": words, "tokens": tokens}
        self._append(_line("length", {"cell": cell, "words": words, "tokens": tokens}))


def _line(kind: str, body: dict[str, Any]) -> str:
    return json.dumps({"kind": kind, **body}, sort_keys=True) + "\n"


def read_lines(file: Path) -> Iterator[dict[str, Any]]:
    """The lines of a journal; a torn last one is left out. ValueError names file, line and fault."""
    lines = file.read_text().split("\n")
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            raw = json.loads(text)
            if number == 1 and raw.get("schema") != SCHEMA:
                raise ValueError(f"its schema is {raw.get('schema')!r}, this version reads {SCHEMA!r}")
            raw["kind"]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if number == len(lines) and number > 1:
                return
            raise ValueError(f"{file}:{number} is not a record of a recall run: {error}; give another --out") from error
        yield raw


def read_exchanges(file: Path) -> tuple[dict[str, Any], list[Exchange]]:
    """(settings, exchanges) of a finished or interrupted run, failed exchanges included."""
    settings: dict[str, Any] = {}
    exchanges: list[Exchange] = []
    for raw in read_lines(file):
        kind = raw.pop("kind")
        if kind == "settings":
            settings = raw["settings"]
        elif kind == "exchange":
            exchanges.append(Exchange.from_dict(raw))
    return settings, exchanges
