"""Conversations to play against a server, what each answer must hold, and the grading of an answer."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Message = dict[str, Any]
SuiteName = Literal["needle", "tools", "secret", "config"]
SUITES: tuple[SuiteName, ...] = ("needle", "tools", "secret", "config")


@dataclass(frozen=True)
class Expect:
    """What an answer must hold.

    contains   every one of these texts, as whole tokens, ignoring case and thousands separators.
    excludes   none of these: the values of similar facts that were not asked for.
    tool       the tool that must be called; `arguments` are its arguments (compared as texts, ignoring case).
    """

    contains: tuple[str, ...] = ()
    excludes: tuple[str, ...] = ()
    tool: str = ""
    arguments: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Turn:
    """One request of a conversation: `add` are the messages since the last request, the question last.

    `reply` is the scripted assistant message that stands for this turn in the history of later ones. The history never
    holds the server's own words: every prompt is a function of the seed and inherits no fault of an earlier turn.
    """

    add: tuple[Message, ...]
    expect: Expect
    reply: Message | None = None


@dataclass(frozen=True)
class Conversation:
    """A scripted conversation.

    id       `suite/length/what`, unique in a run.   length  prompt tokens aimed at, as the server counts them.
    depth    where the fact lies: a name (`start`, `middle`, `end`) or what the cell is called in the summary.
    tools    tool definitions in the OpenAI form, sent with every turn.
    """

    id: str
    suite: SuiteName
    length: int
    depth: str
    turns: tuple[Turn, ...]
    tools: tuple[dict[str, Any], ...] = ()

    def messages(self, turn: int) -> list[Message]:
        """The whole prompt of request `turn`: all messages up to and including its question."""
        history: list[Message] = []
        for number, part in enumerate(self.turns[: turn + 1]):
            history.extend(part.add)
            if number < turn and part.reply is not None:
                history.append(part.reply)
        return history

    def digest(self) -> str:
        """16 hex digits that identify the prompts: a resumed run must ask exactly the same."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Answer:
    """A server's answer. `tool_calls` in the OpenAI form; `finish_reason` as sent (`stop`, `length`, `tool_calls`)."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[dict[str, Any], ...] = ()
    finish_reason: str = ""


@dataclass(frozen=True)
class Grade:
    """Whether the answer holds what was asked, and if not, why, in a few words."""

    passed: bool
    why: str = ""


def _plain(text: str) -> str:
    """Lower case, without separators inside numbers (1,234 or 1 234 or 1-234 read as 1234)."""
    return re.sub(r"(?<=\d)[,\s\u00a0\u202f-](?=\d)", "", text.lower())


def holds(text: str, value: str) -> bool:
    """Whether `value` stands in `text` as whole tokens: 123 is not in 91234."""
    return re.search(rf"(?<!\w){re.escape(_plain(value))}(?!\w)", _plain(text)) is not None


def grade(expect: Expect, answer: Answer) -> Grade:
    """Grades one answer; one that was cut at the token limit says so, since then the limit failed first."""
    if expect.tool:
        return _grade_call(expect, answer)
    missing = [value for value in expect.contains if not holds(answer.content, value)]
    wrong = [value for value in expect.excludes if holds(answer.content, value)]
    if missing and answer.finish_reason == "length":
        return Grade(False, f"cut at the token limit before {missing[0]!r}; raise --max-tokens")
    if missing and wrong:
        return Grade(False, f"gave {wrong[0]!r}, a similar fact, for {missing[0]!r}")
    if missing:
        return Grade(False, f"{missing[0]!r} is not in the answer")
    if wrong:
        return Grade(False, f"also gave {wrong[0]!r}, which was not asked for")
    return Grade(True)


def _grade_call(expect: Expect, answer: Answer) -> Grade:
    calls = [call.get("function", {}) for call in answer.tool_calls]
    named = [call for call in calls if call.get("name") == expect.tool]
    if not named:
        got = ", ".join(str(call.get("name")) for call in calls) or "no tool"
        return Grade(False, f"called {got} instead of {expect.tool}")
    for call in named:
        try:
            arguments = json.loads(call.get("arguments") or "{}")
        except ValueError:
            return Grade(False, f"arguments of {expect.tool} are not JSON: {str(call.get('arguments'))[:60]!r}")
        if isinstance(arguments, Mapping) and all(
            str(arguments.get(name, "")).strip().lower() == value.lower() for name, value in expect.arguments.items()
        ):
            return Grade(True)
    return Grade(False, f"called {expect.tool} with {str(named[0].get('arguments'))[:60]}, wanted {expect.arguments}")
