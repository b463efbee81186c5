"""One run of a verdict command: a subprocess whose exit code says good, bad, skip or abort."""

import json
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Answer = Literal["good", "bad", "skip", "abort"]

GOOD, BAD, USAGE, SKIP, ABORT = 0, 1, 2, 125, 128
CANNOT_START = (126, 127)
"""What a shell exits with when the command is not executable, or not there: nothing was judged."""

ERROR = re.compile(r"\berror: (?!subprocess-exited-with-error)", re.IGNORECASE)
"""A line that names what went wrong; pip first says that a subprocess did, and only then what."""

HINTS = ("Note:", "hint:", "note:")
"""How lines start that say what to do, not what happened."""

CONTENT = ("agrees", "explained", "cannot judge", "pass", "good", "skip")
"""How conclusions start that do not make a verdict's stage the failing one."""


class Refused(ValueError):
    """What was asked for cannot be done as asked: one sentence with the value, why, and what to do. Exit code 2."""


class CannotJudge(ValueError):
    """The question has no answer here (no good commit, a flaky verdict, everything skipped). Exit code 125."""


class Aborted(RuntimeError):
    """The verdict command asked to stop (exit code 128 or more), or the harness broke. Exit code 128."""


@dataclass(frozen=True)
class Trial:
    """One run: its answer, seed and duration (seconds), the failing stage if it named one, and why it is no answer."""

    answer: Answer
    code: int
    seed: int
    seconds: float
    stage: str = ""
    why: str = ""
    log: str = ""


@dataclass(frozen=True)
class Place:
    """Where a trial runs: a directory, environment variables that select what is installed, words to fill in."""

    tree: Path
    environment: dict[str, str]
    words: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Command:
    """A verdict command: exit code 0 good, 125 skip, 128 or more abort, 126 and 127 skip, anything else bad.

    line         shell command. `{python}`, `{tree}`, `{commit}` or `{version}`, `{seed}` and `{out}` (a fresh directory
                 name it may create) are filled in; they are also in DIFFTEST_TREE, DIFFTEST_COMMIT, DIFFTEST_SEED ...
    usage_skips  exit code 2 means "does not know this case or path", which an older commit may not: skip, not bad.
    timeout      seconds after which the run is stopped and skipped; 0 means none.
    stage        only a failure at this stage is bad; a failure elsewhere says nothing about it and is skipped.
    """

    line: str
    usage_skips: bool = False
    timeout: float = 0.0
    stage: str = ""

    def run(self, place: Place, seed: int, logs: Path) -> Trial:
        """Runs once in `place`; output goes to `logs`.out and `logs`.err. KeyboardInterrupt ends the command, too."""
        words = {
            **place.words,
            "seed": str(seed),
            "out": str(logs.with_suffix(".run").resolve()),
            "tree": str(place.tree),
        }
        started = time.monotonic()
        code = run_shell(self.line, place, words, logs, self.timeout)
        seconds = time.monotonic() - started
        report = read_report(logs.with_suffix(".out"), Path(words["out"]))
        return self.judge(code, seed, seconds, report, logs)

    def judge(self, code: int | None, seed: int, seconds: float, report: dict[str, Any], logs: Path) -> Trial:
        """The trial that an exit code (None: stopped at the timeout) and a report amount to."""
        if code is None:
            return Trial("skip", SKIP, seed, seconds, "", f"took longer than {self.timeout:g} s", str(logs))
        code = ABORT - code if code < 0 else code
        stage = stage_of(report) if code == BAD else ""
        answer, why = self._answer(code), ""
        if answer == "bad" and self.stage and stage != self.stage:
            answer, why = "skip", f"fails at {stage or 'an unnamed stage'}, not at {self.stage}"
        elif answer in ("skip", "abort"):
            why = f"exit code {code}{_signal(code)}: {last_line(logs) or 'no output'}"
        return Trial(answer, code, seed, seconds, stage, why, str(logs))

    def _answer(self, code: int) -> Answer:
        if code == GOOD:
            return "good"
        if code in (SKIP, *CANNOT_START) or (code == USAGE and self.usage_skips):
            return "skip"
        return "abort" if code >= ABORT else "bad"


def run_shell(line: str, place: Place, words: dict[str, str], logs: Path, timeout: float = 0.0) -> int | None:
    """Exit code of a shell command run in `place`, negative for a signal; None if it was stopped at the timeout.

    It runs in a process group of its own, so that nothing of it outlives an interrupt or the timeout.
    """
    values = {**words, "python": place.words.get("python", "python")}
    for name, value in values.items():
        line = line.replace("{" + name + "}", shlex.quote(value))
    environment = {**place.environment, **{f"DIFFTEST_{name.upper()}": value for name, value in words.items()}}
    logs.parent.mkdir(parents=True, exist_ok=True)
    with logs.with_suffix(".out").open("wb") as out, logs.with_suffix(".err").open("wb") as err:
        child = subprocess.Popen(
            ["/bin/sh", "-c", line],
            cwd=place.tree,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        try:
            return child.wait(timeout or None)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end_group(child)


def _end_group(child: subprocess.Popen[bytes]) -> None:
    """Ends what is left of a command, servers it started included: the next commit must not meet them."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _signal(code: int) -> str:
    number = code - ABORT
    if number in {item.value for item in signal.Signals}:
        return f" (signal {signal.Signals(number).name})"
    return ""


def last_line(logs: Path, limit: int = 160) -> str:
    """Last line that a command printed, hints left out, errors first, cut to `limit` characters."""
    for suffix in (".err", ".out"):
        lines = [line.strip() for line in _tail(logs.with_suffix(suffix)).splitlines() if line.strip()]
        lines = [line for line in lines if not line.startswith(HINTS)]
        if lines:
            return lines[-1][:limit]
    return ""


def first_error(logs: Path, limit: int = 160) -> str:
    """First line of a build's output that reports an error, as compilers and pip do; else its last line."""
    for suffix in (".err", ".out"):
        for line in _tail(logs.with_suffix(suffix)).splitlines():
            if ERROR.search(line):
                return line.strip()[:limit]
    return last_line(logs, limit)


def _tail(file: Path, size: int = 1 << 20) -> str:
    if not file.is_file():
        return ""
    with file.open("rb") as stored:
        stored.seek(max(0, file.stat().st_size - size))
        return stored.read().decode(errors="replace")


def read_report(output: Path, out: Path) -> dict[str, Any]:
    """The last JSON object a command printed, else the run.json in the directory it was given; else {}."""
    text = _tail(output)
    for candidate in _objects(text):
        return candidate
    manifest = out / "run.json"
    for candidate in _objects(_tail(manifest)):
        return candidate
    return {}


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """JSON objects that start a line of `text`, last first; what follows an object does not matter."""
    lines = text.splitlines()
    for start in range(len(lines) - 1, -1, -1):
        if lines[start].startswith("{"):
            with suppress(json.JSONDecodeError):
                found, _ = json.JSONDecoder().raw_decode("\n".join(lines[start:]))
                yield found


def stage_of(report: dict[str, Any]) -> str:
    """The failing stage that a report names: its own `stage`, else that of the first verdict in it that is not content.

    A verdict is any nested object with a `stage`; it is content if its `exit_code` is 0 or 125, or if its `conclusion`,
    `verdict`, `answer` or `outcome` starts with one of CONTENT.
    """
    level: list[Any] = [report]
    while level:
        for item in level:
            if isinstance(item, dict) and isinstance(item.get("stage"), str) and item["stage"] and not _content(item):
                return str(item["stage"])
        level = [part for item in level for part in _parts(item)]
    return ""


def _content(verdict: dict[str, Any]) -> bool:
    if verdict.get("exit_code") in (GOOD, SKIP):
        return True
    return any(str(verdict.get(name)).startswith(CONTENT) for name in ("conclusion", "verdict", "answer", "outcome"))


def _parts(item: Any) -> list[Any]:
    if isinstance(item, dict):
        return list(item.values())
    return list(item) if isinstance(item, list) else []
