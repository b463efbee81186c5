"""`make bench-cpu`: wall time and peak memory of the main jobs on this machine, beside the limits they should keep."""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from .report import listing

GIB = 2**30


@dataclass(frozen=True)
class Job:
    """A command and its limits on two idle cores. `limit_gib` 0 means that memory is only shown."""

    name: str
    command: tuple[str, ...]
    limit_seconds: float
    limit_gib: float


@dataclass(frozen=True)
class Measured:
    """Wall seconds and the largest resident set of any process of the job, in GiB."""

    job: str
    exit_code: int
    seconds: float
    limit_seconds: float
    peak_gib: float
    limit_gib: float


def jobs(out: Path) -> list[Job]:
    """The main job, a decode step over a million tokens, and the tests."""
    difftest = str(Path(sys.executable).with_name("difftest"))
    run = (difftest, "run", "--device", "cpu", "--keep", "none")
    return [
        Job("difftest run", (*run, "--out", str(out / "run")), 90, 6),
        Job("decode-1048576", (*run, "--case", "decode-1048576", "--out", str(out / "million")), 600, 8),
        Job("pytest", (sys.executable, "-P", "-m", "pytest", "-q", "-n", "2"), 600, 0),
    ]


def measure(job: Job) -> Measured:
    """Runs a job with its output on stderr."""
    started = time.perf_counter()
    process = subprocess.Popen(job.command, stdout=sys.stderr)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    code = os.waitstatus_to_exitcode(status)
    return Measured(
        job.name,
        code,
        round(seconds, 1),
        job.limit_seconds,
        round(usage.ru_maxrss * 1024 / GIB, 2),
        job.limit_gib,
    )


def main() -> None:
    """Prints a table, or JSON lines with `--json`."""
    with tempfile.TemporaryDirectory() as out:
        found = [measure(job) for job in jobs(Path(out))]
    if "--json" in sys.argv[1:]:
        for one in found:
            print(json.dumps(asdict(one)))
        return
    listing.show([asdict(one) for one in found], Console())


if __name__ == "__main__":
    main()
