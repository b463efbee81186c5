"""Cases a minute of the suite on one GPU and on all that CUDA_VISIBLE_DEVICES (or nvidia-smi) shows, builds warm.

    python tests/gpu/scaling.py --profile full --out runs/scaling

Each run starts the suite with one worker for each GPU (--per-gpu for more) and prints units (one case on one layer,
through all paths) a minute, between the start of the first and the end of the last. The first run only builds.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from difftest.scale.gpus import VISIBLE, visible_gpus

UNIT = re.compile(r"\[(?P<unit>.+?-layer\d+)-")
EVENTS = "DIFFTEST_SCALING_EVENTS"


def pytest_runtest_logreport(report):
    """As a plugin (`-p scaling`) of the controller: one line a finished test, with the time at which it started."""
    if EVENTS in os.environ and report.when == "call" and not os.environ.get("PYTEST_XDIST_WORKER"):
        unit = UNIT.search(report.nodeid)
        if unit and report.outcome != "skipped":
            with open(os.environ[EVENTS], "a") as lines:
                lines.write(json.dumps([unit["unit"], report.start, report.stop]) + "\n")


def rate(events: Path) -> tuple[int, float]:
    """(units that ran, units a minute) of a file of events."""
    rows = [json.loads(line) for line in events.read_text().splitlines()]
    units = {row[0] for row in rows}
    return len(units), 60 * len(units) / (max(row[2] for row in rows) - min(row[1] for row in rows))


def run(out: Path, name: str, devices: list[str], options: argparse.Namespace, profile: str) -> tuple[int, float]:
    """Runs the suite on these devices into `out`/name."""
    events = out / f"{name}.jsonl"
    environment = {
        **os.environ,
        EVENTS: str(events),
        "PYTHONPATH": f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}",
    }
    if devices:
        environment[VISIBLE] = ",".join(devices)
    workers = max(1, len(devices)) * options.per_gpu
    command = [
        sys.executable,
        "-P",
        "-m",
        "pytest",
        "-q",
        "-p",
        "scaling",
        "-p",
        "no:cacheprovider",
        "--pyargs",
        "difftest.suite",
    ]
    command += ["-n", str(workers), "--difftest-device", options.device, "--difftest-profile", profile]
    command += [
        "--difftest-out",
        str(out / name),
        *(part for path in options.path for part in ("--difftest-path", path)),
    ]
    command += [part for case in options.case for part in ("--difftest-case", case)]
    started = time.monotonic()
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    print(
        f"{name}: exit code {done.returncode}, {time.monotonic() - started:.1f} s; {done.stdout.splitlines()[-1:]}",
        flush=True,
    )
    return rate(events)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--profile", default="full")
    parser.add_argument("--path", action="append", default=[])
    parser.add_argument("--case", action="append", default=[])
    parser.add_argument("--per-gpu", type=int, default=1)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True)
    tokens = [gpu.token for gpu in visible_gpus()]
    run(options.out, "warm", tokens, options, "smoke")
    rates = {}
    for count in dict.fromkeys((1, len(tokens))):
        units, per_minute = run(options.out, f"gpus-{count}", tokens[:count], options, options.profile)
        rates[count] = per_minute
        print(f"{count} GPUs: {units} cases and layers, {per_minute:.1f} a minute", flush=True)
    if len(tokens) > 1:
        print(f"{len(tokens)} GPUs run {rates[len(tokens)] / rates[1]:.2f} times the cases of one")


if __name__ == "__main__":
    main()
