"""A conversation that goes on over tool calls: call, long result, answer, second call, recall of the first result."""

import json
from typing import Any

from ..conversation import Conversation, Expect, Message, Turn
from ..text import Planted, filler
from .needle import facts

READ_LOG: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "read_log",
        "description": "Returns the maintenance log of one machine.",
        "parameters": {
            "type": "object",
            "properties": {"machine": {"type": "string", "description": "name of the machine"}},
            "required": ["machine"],
        },
    },
}
SYSTEM = "You look after machines. To read a machine's maintenance log, call the tool read_log; never guess it."


def _call(number: int, machine: str) -> Message:
    arguments = json.dumps({"machine": machine})
    function = {"name": "read_log", "arguments": arguments}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": f"call_{number}", "type": "function", "function": function}],
    }


def _result(number: int, text: str) -> Message:
    return {"role": "tool", "tool_call_id": f"call_{number}", "content": text}


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _log(seed: int, words: int, name: str, code: str, length: int, number: int) -> str:
    line = Planted(f"The replacement part of the {name} has serial number {code}.", 0.5)
    return f"Log of the {name}\n\n" + filler(seed, words, [line], "tools", length, number)


def tools(seed: int, length: int, depth: str, words: int) -> Conversation:
    """Five requests: call, answer from the result, call again, answer, and a question about the first result.

    `depth` names the cell (`continuation`). Two thirds of the filler are in the first log, so that the last question
    reaches back over most of the prompt.
    """
    (first, one), (second, two) = facts(seed, 2, "tools", length)
    long, short = words - words // 3, words // 3
    ask = "Which serial number does the replacement part of the {} have? Read its log and answer with the number only."
    code_one: Message = {"role": "assistant", "content": one}
    code_two: Message = {"role": "assistant", "content": two}
    turns = (
        Turn(
            ({"role": "system", "content": SYSTEM}, _user(ask.format(first))),
            Expect(tool="read_log", arguments={"machine": first}),
            _call(1, first),
        ),
        Turn((_result(1, _log(seed, long, first, one, length, 1)),), Expect(contains=(one,)), code_one),
        Turn((_user(ask.format(second)),), Expect(tool="read_log", arguments={"machine": second}), _call(2, second)),
        Turn((_result(2, _log(seed, short, second, two, length, 2)),), Expect(contains=(two,)), code_two),
        Turn(
            (_user(f"And which serial number did the part of the {first} have? Answer with the number only."),),
            Expect(contains=(one,), excludes=(two,)),
        ),
    )
    return Conversation(f"tools/{length}/{depth}", "tools", length, depth, turns, (READ_LOG,))
