"""What a search has found out so far, on disk after every trial, so that an interrupted one goes on where it was."""

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from .trial import Refused, Trial

SCHEMA = "difftest.bisect/1"
STATE = "state.json"


@dataclass
class Ledger:
    """The state file of a search: its plan, every trial by subject, and facts found on the way.

    Produced by the searches, consumed by `--resume` and by people. Searches are deterministic given the trials, so the
    trials are the whole state: a resumed search replays them and goes on.
    """

    folder: Path
    plan: dict[str, Any]
    trials: dict[str, list[Trial]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def create(cls, folder: Path, plan: dict[str, Any]) -> Self:
        """A new state file, or the one of the same plan. Refused if `folder` holds anything else."""
        if (folder / STATE).is_file():
            stored = cls.open(folder)
            if stored.plan != plan:
                raise Refused(
                    f"{folder} holds another bisection; go on with it by --resume {folder} or name another --out"
                )
            return stored
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise Refused(f"{folder} is not empty: a search never overwrites; name another --out or delete it")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".gitignore").write_text("*\n")
        ledger = cls(folder, plan)
        ledger.save()
        return ledger

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Reads the state of an earlier search. Refused with the file and what is wrong with it."""
        file = folder / STATE
        if not file.is_file():
            raise Refused(
                f"{folder} holds no bisection: it has no {STATE}; give the --out of an earlier `difftest bisect`"
            )
        try:
            raw = json.loads(file.read_text())
            if raw["schema"] != SCHEMA:
                raise Refused(f"{file} has schema {raw['schema']!r}, this version reads {SCHEMA!r}; start a new search")
            trials = {subject: [Trial(**trial) for trial in kept] for subject, kept in raw["trials"].items()}
            return cls(folder, raw["plan"], trials, raw["facts"])
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise Refused(f"{file} is not the state of a bisection ({error!r}); start a new search") from error

    def save(self) -> None:
        """Writes the state; the old file stays whole until the new one is."""
        raw = {
            "schema": SCHEMA,
            "plan": self.plan,
            "trials": {subject: [asdict(trial) for trial in kept] for subject, kept in self.trials.items()},
            "facts": self.facts,
        }
        part = self.folder / f"{STATE}.part"
        part.write_text(json.dumps(raw, indent=1) + "\n")
        part.replace(self.folder / STATE)

    def add(self, subject: str, trial: Trial) -> None:
        self.trials.setdefault(subject, []).append(trial)
        self.save()

    def note(self, **facts: Any) -> None:
        self.facts.update(facts)
        self.save()

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Held while a search works in the folder. Refused if another process holds it."""
        with (self.folder / "lock").open("w") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise Refused(
                    f"another process is searching in {self.folder}; wait for it, or name another --out"
                ) from error
            yield
