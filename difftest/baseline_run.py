"""Runs base and head alternately, seed by seed on one machine, so that whatever drifts hits both sides alike."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from .diagnose.environments import plain_environment
from .diagnose.trial import CannotJudge, Place, Refused, last_line, run_shell

SIDES = ("base", "head")
JUDGED = (0, 1)
"""Exit codes of a run that has measured something: it agrees, or disagrees."""


def order(seeds: int) -> list[tuple[int, str]]:
    """Runs in ABBA order: base first at even seeds, head first at odd ones, so that a steady drift cancels."""
    return [(seed, side) for seed in range(seeds) for side in (SIDES if seed % 2 == 0 else SIDES[::-1])]


def run(base: str, head: str, seeds: int, out: Path, say: Callable[[str], None] = lambda _: None) -> None:
    """Runs both shell commands for seeds 0 to `seeds` - 1 into `out`/base/seed-N and `out`/head/seed-N.

    `{seed}`, `{out}` and `{python}` are filled in; a command writes its run directory to `{out}`. What is there already
    is kept, so an interrupted run goes on. Refused for a command without `{out}`; CannotJudge names the run that failed
    and the last line it printed.
    """
    commands = dict(zip(SIDES, (base, head), strict=True))
    for side, command in commands.items():
        if "{out}" not in command:
            raise Refused(f"the {side} command does not use {{out}}, so its records cannot be found; add --out {{out}}")
    for seed, side in order(seeds):
        folder = out.resolve() / side / f"seed-{seed}"
        if folder.exists():
            say(f"{side} seed {seed}: kept")
            continue
        part = folder.with_name(f"{folder.name}.part")
        _clear(part)
        words = {"seed": str(seed), "out": str(part), "python": sys.executable}
        logs = out / "logs" / f"{side}-{seed}"
        code = run_shell(commands[side], Place(Path.cwd(), plain_environment(), words), words, logs)
        if code not in JUDGED or not part.is_dir():
            raise CannotJudge(f"{side} seed {seed} ended with exit code {code}: {last_line(logs) or 'no output'}")
        part.rename(folder)
        say(f"{side} seed {seed}: exit code {code}")


def _clear(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
