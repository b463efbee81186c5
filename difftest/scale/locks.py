"""What workers of one host share: one builds while the others wait, and a GPU's memory is lent out case by case."""

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PROCESSES = Path("/proc")
ENDED = ("Z", "X")
"""States of a process that has ended, in /proc/PID/stat."""

POLL = 0.05
"""Seconds between two looks at a ledger that is full."""


def cache_folder() -> Path:
    """Where builds are noted: DIFFTEST_CACHE_DIR, else `difftest` in the user's cache folder."""
    named = os.environ.get("DIFFTEST_CACHE_DIR")
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(named) if named else home / "difftest"


@contextmanager
def exclusive(file: Path) -> Iterator[None]:
    """Holds an advisory lock on `file`; waits for whoever has it. The kernel frees it when a process dies."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@contextmanager
def build_once(what: str, folder: Path | None = None) -> Iterator[bool]:
    """Lets one process at a time do `what` for the first time; yields whether this one is the first.

    `what` names everything the build depends on (path, versions, GPU). Once a process has left the block without an
    exception, others enter at once and side by side. A builder that dies leaves the lock free and the build not done.
    """
    stem = hashlib.sha256(what.encode()).hexdigest()[:20]
    folder = (folder or cache_folder()) / "built"
    stamp = folder / f"{stem}.json"
    if stamp.is_file():
        yield False
        return
    with exclusive(folder / f"{stem}.lock"):
        first = not stamp.is_file()
        if first:
            yield True
            part = stamp.with_suffix(f".{os.getpid()}.part")
            part.write_text(json.dumps({"built": what, "at": time.strftime("%Y-%m-%dT%H:%M:%S")}) + "\n")
            part.replace(stamp)
    if not first:
        yield False


@contextmanager
def memory_lease(need: int, capacity: int, ledger: Path) -> Iterator[None]:
    """Waits until `need` of `capacity` bytes are free in the ledger file, and holds them.

    A case that needs more than the whole capacity runs alone. Leases of processes that have died count as free.
    """
    need = min(need, capacity)
    entry = f"{os.getpid()}"
    while not _take(ledger, entry, need, capacity):
        time.sleep(POLL)
    try:
        yield
    finally:
        with _open_ledger(ledger) as leases:
            leases.pop(entry, None)


def _take(ledger: Path, entry: str, need: int, capacity: int) -> bool:
    with _open_ledger(ledger) as leases:
        for pid in [pid for pid in leases if not alive(int(pid))]:
            del leases[pid]
        if sum(leases.values()) + need > capacity:
            return False
        leases[entry] = need
        return True


@contextmanager
def _open_ledger(ledger: Path) -> Iterator[dict[str, int]]:
    """Bytes held by process id, under the ledger's lock; written back on leaving."""
    with exclusive(ledger.with_suffix(".lock")):
        leases: dict[str, int] = json.loads(ledger.read_text()) if ledger.is_file() else {}
        yield leases
        part = ledger.with_suffix(".part")
        part.write_text(json.dumps(leases))
        part.replace(ledger)


def alive(pid: int) -> bool:
    """Whether a process of this host runs; one that has ended and waits for its parent (a zombie) does not."""
    if PROCESSES.is_dir():
        try:
            return (PROCESSES / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] not in ENDED
        except OSError:
            return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
