"""Runs a bundle's layer again, under the path it fails on or any other, up to the stage it fails at."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..paths.base import get_path
from ..verdict import explain_failure
from .bundle import Bundle
from .signature import Examined, examine

SCHEMA = "difftest.replay/1"
CANNOT_JUDGE = 125


class Unavailable(Exception):
    """The path cannot run here; the message says why and what to install."""


@dataclass(frozen=True)
class Replayed:
    """One rerun of a bundle.

    same   whether it fails as it did when the bundle was written.
    """

    bundle: Bundle
    path: str
    seen: Examined
    same: bool

    @property
    def exit_code(self) -> int:
        """0 agrees, 1 disagrees (in the same way or another), 125 cannot judge."""
        return self.seen.verdict.exit_code

    def sentence(self) -> str:
        """How this run compares with the recorded failure."""
        recorded, now = self.bundle.signature.words(), self.seen.signature
        if self.same:
            return f"the recorded failure: {recorded}"
        if now:
            return f"another failure than the recorded one: {now.words()}, recorded was {recorded}"
        return f"the recorded failure does not appear: {recorded}"

    def text(self) -> str:
        """For people: the verdict, a line a stage if it fails, and how that compares with the recorded failure."""
        verdict = self.seen.verdict
        if verdict.exit_code != 1:
            return f"{verdict}\n{self.sentence()}"
        lines = explain_failure(verdict, self.seen.records).splitlines()
        return "\n".join([*(line for line in lines if not line.strip().startswith("run again:")), self.sentence()])

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "bundle": str(self.bundle.folder),
            "exit_code": self.exit_code,
            "same_failure": self.same,
            "says": self.sentence(),
            "recorded": self.bundle.signature.words(),
            "verdicts": [self.seen.verdict.to_json()],
        }


def replay(bundle: Bundle, spec: str = "", device: str = "", passing: bool = False) -> Replayed:
    """Reruns `bundle` under the path `spec` (its own if empty) and judges it under its own policy.

    passing   run the neighbour that passes instead.

    Raises ValueError for an unknown path or a bundle without a neighbour, Unavailable for a path that cannot run here.
    """
    inputs = bundle.passing if passing else bundle.inputs
    if inputs is None:
        raise ValueError(f"{bundle.folder} holds no passing neighbour: none was met; leave --passing out")
    spec = spec or bundle.path
    path = _loaded(lambda: get_path(spec), spec)
    available = path.availability()
    if not available.ok:
        raise Unavailable(f"path {spec} cannot run here: {available.why}; {available.install}".rstrip("; "))
    signature = bundle.signature
    where = device or str(bundle.facts.get("device", "cpu"))
    seen = examine(path, inputs, bundle.case.id, bundle.policy(), signature, where)
    return Replayed(bundle, spec, seen, seen.signature == signature)


def _loaded(make: Callable[[], Any], spec: str) -> Any:
    """The path; Unavailable if its module cannot be imported, as at a commit at which it does not build."""
    try:
        return make()
    except ValueError:
        raise
    except Exception as error:
        raise Unavailable(f"path {spec} cannot be loaded: {type(error).__name__}: {error}") from error
