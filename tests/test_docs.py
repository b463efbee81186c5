"""The documentation's example fails as its text says."""

import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def test_the_planted_bug_of_the_tutorial_is_found() -> None:
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_my_kernel.py")
    done = subprocess.run(command, cwd=DOCS / "examples", capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stdout + done.stderr
    found = [line for line in done.stdout.splitlines() if "bug at index_q" in line and line.startswith("E ")]
    shown = [line for line in (DOCS / "tutorial.md").read_text().splitlines() if "bug at index_q" in line]
    assert found and found[0].split("got")[0].split("E ")[1].strip() == shown[0].split("got")[0].split("E ")[1].strip()
