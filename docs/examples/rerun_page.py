"""Runs the `$` commands of a documentation page in a fresh folder and puts their real output into the page.

    python docs/examples/rerun_page.py docs/walkthrough.md

A console block of the page is a command line that starts with `$`, and what it printed. Commands share one folder, one
shell environment, and a virtual environment laid over the running one, so that a `pip install` in them stays theirs.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from difftest.diagnose.environments import make_venv, venv_environment

BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TOOLS = {"difftest": "-P -m difftest", "pytest": "-P -m pytest -p no:cacheprovider", "python": "-P"}
WIDTH = "130"
EXAMPLES = Path(__file__).parent


def rerun(page: str, folder: Path) -> str:
    """The page with every console block's output replaced by what its command prints now, in `folder`."""
    environment = _environment(folder)

    def block(found: re.Match[str]) -> str:
        command = found.group(1).splitlines()[0].removeprefix("$ ")
        return f"```console\n$ {command}\n{run(command, folder, environment)}```"

    return BLOCK.sub(block, page)


def run(command: str, folder: Path, environment: dict[str, str]) -> str:
    """What a command prints, ending in a line break, with its exit code where that is not 0."""
    print(f"$ {command}", file=sys.stderr)
    done = subprocess.run(
        command, shell=True, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    printed = done.stdout.replace(f"{folder}/", "").replace(str(folder), ".").rstrip() + "\n"
    return printed.lstrip("\n") + (f"[exit code {done.returncode}]\n" if done.returncode else "")


def _environment(folder: Path) -> dict[str, str]:
    """A virtual environment in `folder`/.venv with the tools of the running one, which would not see what it holds."""
    python = make_venv(folder / ".venv", overlay=True)
    for name, words in TOOLS.items():
        tool = python.parent / name
        if tool.exists():
            continue
        tool.write_text(f'#!/bin/sh\nexec {python} {words} "$@"\n')
        tool.chmod(0o755)
    more = {"COLUMNS": WIDTH, "EXAMPLES": str(EXAMPLES), "GIT_PAGER": "cat", "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    return {**os.environ, **venv_environment(folder / ".venv"), **more}


def main() -> None:
    file = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        page = rerun(file.read_text(), Path(folder).resolve())
    file.write_text(page)


if __name__ == "__main__":
    main()
