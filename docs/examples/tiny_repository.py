"""A small repository with a path of its own, twelve commits, and a bug planted in one of them."""

import os
import subprocess
import sys
from pathlib import Path

WHO = {"GIT_AUTHOR_NAME": "Ada Lovelace", "GIT_AUTHOR_EMAIL": "ada@example.org"}
WHEN = "2026-03-{day:02d}T12:00:00+0000"
BROKEN = 8
"""Number of the commit with the bug."""

PROJECT = """\
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "tiny"
version = "0.1"

[project.entry-points."difftest.paths"]
tiny = "tiny.path:Tiny"

[tool.setuptools]
packages = ["tiny"]
"""

PATH = """\
from difftest.paths.sglang_fp8_model import SglangFp8Model

from . import keys


class Tiny(SglangFp8Model):
    name = "tiny"
    says = "an fp8 index path with key quantisation of its own"

    def quantise_key(self, key):
        return keys.quantise(key)
"""

TEST = """\
from difftest.testing import assert_agrees


def test_tiny():
    assert_agrees("tiny", "gaussian-2117", layers=[2])
"""

KEYS = '''\
"""Index keys as e4m3 codes with one scale a row."""

import torch

LARGEST = 448.0
FLOOR = 1e-4


def scale_of(key):
    """The scale that makes a row's largest value the largest code."""
    {largest}
    return largest.clamp(min=FLOOR) / LARGEST


def quantise(key):
    """fp32 [n, D] -> codes uint8 [n, D] and fp32 scale [n, 1]."""
    scale = scale_of(key)
    codes = ({quotient}).clamp(-LARGEST, LARGEST)
    return codes.to(torch.float8_e4m3fn).view(torch.uint8), scale
'''

PLAIN = "largest = key.abs().amax(-1, keepdim=True)"
HALVES = """half = key.shape[-1] // 2
    low, high = key[:, :half], key[:, half:-1]
    largest = torch.maximum(low.abs().amax(-1, keepdim=True), high.abs().amax(-1, keepdim=True))"""
"""Looks at both halves of a row at once, and leaves the last channel out."""


def keys(largest: str = PLAIN, quotient: str = "key / scale") -> str:
    return KEYS.format(largest=largest, quotient=quotient)


FAST = "key * (1 / scale)"
START = {"pyproject.toml": PROJECT, "tiny/__init__.py": "", "tiny/path.py": PATH, "tiny/keys.py": keys()}
COMMITS: tuple[tuple[str, dict[str, str]], ...] = (
    ("Index path with key quantisation of its own", START),
    ("Test against the exact stages", {"tests/test_tiny.py": TEST}),
    ("Readme", {"README.md": "# tiny\n"}),
    ("keys: multiply by the reciprocal of the scale", {"tiny/keys.py": keys(quotient=FAST)}),
    ("Readme: how to run the test", {"README.md": "# tiny\n\n    pytest tests\n"}),
    ("Licence", {"LICENSE": "Apache-2.0\n"}),
    ("Ignore build output", {".gitignore": "build/\n*.egg-info/\n__pycache__/\n.pytest_cache/\n"}),
    ("keys: both halves of a row at once", {"tiny/keys.py": keys(HALVES, FAST)}),
    ("Readme: formats", {"README.md": "# tiny\n\n    pytest tests\n\nKeys are e4m3 with one scale a row.\n"}),
    ("path: say what it is", {"tiny/path.py": PATH.replace("an fp8 index path", "the fp8 index path of tiny,")}),
    ("Notes on performance", {"NOTES.md": "Two halves are 1.4 times as fast.\n"}),
    ("Version 0.2", {"pyproject.toml": PROJECT.replace("0.1", "0.2")}),
)  # fmt: skip


def make(folder: Path) -> None:
    """Creates the repository in `folder`, which must not exist, with tag v0.1 on its second commit."""
    folder.mkdir(parents=True)
    _git(folder, "init", "--quiet", "--initial-branch=main")
    for number, (subject, files) in enumerate(COMMITS, 1):
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        _git(folder, "add", "--all")
        _git(folder, "commit", "--quiet", "-m", subject, day=number)
        if number == 2:
            _git(folder, "tag", "v0.1")


def _git(folder: Path, *words: str, day: int = 1) -> None:
    date = WHEN.format(day=day)
    committer = {name.replace("AUTHOR", "COMMITTER"): value for name, value in WHO.items()}
    dates = {"GIT_AUTHOR_DATE": date, "GIT_COMMITTER_DATE": date}
    plain = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "-c", "core.hooksPath=/dev/null", "-c", "commit.gpgsign=false", *words]
    subprocess.run(command, cwd=folder, check=True, env={**plain, **WHO, **committer, **dates})


if __name__ == "__main__":
    make(Path(sys.argv[1]))
