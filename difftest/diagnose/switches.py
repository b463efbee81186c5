"""Switches a user names, tried on and off in processes of their own."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..cases.case import Case
from .ddmin import Outcome

SwitchKind = Literal["environment", "case", "path", "callable"]

HELP = "NAME=VALUE (environment), case.FIELD=VALUE, path.OPTION=VALUE or module:function"


@dataclass(frozen=True)
class Switch:
    """One thing that can be on or off.

    environment   a variable set to a value.   case   a value of the model's config replaced (`case.index_topk=1024`).
    path          an option of the path (`path.q=fp8`).
    callable      a function `module:function`, called once before anything runs; it may patch what it likes, since the
                  process ends with the trial.
    """

    text: str
    kind: SwitchKind
    name: str
    value: str = ""


def parse(text: str) -> Switch:
    """A switch from its command-line form. ValueError says what the forms are."""
    head, equals, value = text.partition("=")
    if equals:
        prefix, dot, rest = head.partition(".")
        if dot and prefix in ("case", "path") and rest:
            return Switch(text, "case" if prefix == "case" else "path", rest, value)
        if head.isidentifier():
            return Switch(text, "environment", head, value)
    module, colon, function = text.partition(":")
    if not equals and colon and module and function:
        return Switch(text, "callable", module, function)
    raise ValueError(f"switch {text!r} is none of {HELP}")


def number(text: str) -> Any:
    """A config value as JSON reads it, else the text itself."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


@dataclass(frozen=True)
class Trial:
    """One process: its verdicts by layer, as `difftest.diagnose.switched` prints them, or why there are none."""

    verdicts: tuple[dict[str, Any], ...] = ()
    error: str = ""

    @property
    def signature(self) -> tuple[str, str]:
        """Answer and stage of the first layer that does not agree; ("agrees", "") if all do."""
        for verdict in self.verdicts:
            if verdict["answer"] != "agrees":
                return verdict["answer"], verdict["stage"] or ""
        return ("agrees", "") if self.verdicts else ("cannot judge", "")

    @property
    def why(self) -> str:
        """The first verdict that does not agree, in its own words, or the error."""
        told = next((verdict["text"] for verdict in self.verdicts if verdict["answer"] != "agrees"), "agrees")
        return self.error or str(told)


class Trials:
    """Runs a case and path with sets of switches on; judges against the failure at one end."""

    def __init__(
        self,
        case: Case,
        path: str,
        switches: Sequence[Switch],
        *,
        layers: Sequence[int] = (),
        device: str = "cpu",
        policy: str = "default",
    ) -> None:
        self.switches = {switch.text: switch for switch in switches}
        self._request = {
            "case": json.loads(case.to_json()),
            "path": path,
            "layers": list(layers or case.layers),
            "device": device,
            "policy": policy,
        }
        self._made: dict[frozenset[str], Trial] = {}

    def trial(self, on: frozenset[str]) -> Trial:
        """The outcome with exactly `on` switched on, in a fresh process."""
        if on not in self._made:
            self._made[on] = self._run([switch for text, switch in self.switches.items() if text in on])
        return self._made[on]

    def outcome(self, on: frozenset[str]) -> Outcome:
        """passes; fails, if it is the failure seen at one end (same answer, same stage); other."""
        signature = self.trial(on).signature
        if signature[0] == "agrees":
            return "passes"
        return "fails" if signature == self._failure() else "other"

    def to_json(self) -> list[dict[str, Any]]:
        """Every trial so far: what was on, and what it showed."""
        return [{"on": sorted(on), "answer": trial.signature, "why": trial.why} for on, trial in self._made.items()]

    def _failure(self) -> tuple[str, str]:
        """The failure that is looked for: that of all switches on, else that of all off."""
        for end in (frozenset(self.switches), frozenset[str]()):
            signature = self.trial(end).signature
            if signature[0] in ("bug", "explained"):
                return signature
        return ("agrees", "")

    def _run(self, on: Sequence[Switch]) -> Trial:
        request = {**self._request, "switches": [[switch.kind, switch.name, switch.value] for switch in on]}
        variables = {switch.name: switch.value for switch in on if switch.kind == "environment"}
        off = {switch.name for switch in self.switches.values() if switch.kind == "environment"}
        clean = {name: value for name, value in os.environ.items() if name not in off}
        made = subprocess.run(
            [sys.executable, "-P", "-m", "difftest.diagnose.switched"],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            env={**clean, **variables},
            check=False,
        )
        if made.returncode:
            last = (made.stderr.strip().splitlines() or ["no output"])[-1]
            return Trial(error=f"exit code {made.returncode}: {last}")
        return Trial(tuple(json.loads(made.stdout.strip().splitlines()[-1])))
