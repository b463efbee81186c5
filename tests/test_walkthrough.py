"""The walk-through's repository has its bug where the page says, and the page is what its commands print."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

from difftest.cli import app

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "walkthrough.md").read_text()


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / "examples" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("walkthrough") / "tiny"
    example("tiny_repository").make(folder)
    return folder


def git(folder: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True).stdout


def test_the_repository_is_the_one_of_the_page(tiny: Path) -> None:
    """Commits are made with fixed names and dates, so their hashes are those on the page."""
    log = git(tiny, "log", "--oneline").splitlines()
    assert len(log) == 12 and all(line in PAGE for line in log)


def test_its_bug_is_in_the_commit_that_the_page_ends_at(tiny: Path) -> None:
    broken = git(tiny, "log", "--format=%H %s", "-S", "half:-1").split()
    found = re.search(r"first bad commit: (\w+) '(.*?)'.*which fails at (\w+)", PAGE)
    assert found and broken[0].startswith(found[1]) and found[2] == " ".join(broken[1:]) and found[3] == "index_k"


def test_shrink_prints_what_the_page_shows(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "site" / "tiny.egg-info"
    info.mkdir(parents=True)
    (info / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: tiny\nVersion: 0.2\n")
    (info / "entry_points.txt").write_text("[difftest.paths]\ntiny = tiny.path:Tiny\n")
    monkeypatch.syspath_prepend(tiny)
    monkeypatch.syspath_prepend(info.parent)
    words = ["shrink", "gaussian-2117", "--path", "tiny", "--layer", "2", "--out", str(tmp_path / "bundle")]
    done = CliRunner().invoke(app, words)
    for name in [name for name in sys.modules if name == "tiny" or name.startswith("tiny.")]:
        del sys.modules[name]
    assert done.exit_code == 1, done.output
    printed = [line for line in done.output.splitlines() if re.match(r"  (entries|values|index dims) +[\d,]+ ", line)]
    assert len(printed) == 3 and all(line in PAGE for line in printed)
    assert re.search(r"same failure \(.*?\)", done.output)[0] in PAGE  # type: ignore[index]


def test_every_command_of_the_page_is_one_of_difftest() -> None:
    commands = re.findall(r"^\$ difftest (\w+)", PAGE, re.MULTILINE)
    assert set(commands) == {"blame", "shrink", "replay", "bisect"}
    for command in set(commands):
        assert CliRunner().invoke(app, [command, "--help"]).exit_code == 0


def test_a_page_is_rerun_block_by_block(tmp_path: Path) -> None:
    page = "# Title\n\n```console\n$ echo new\nold\n```\n\n```console\n$ pwd; false\n```\n\n```toml\n$ kept\n```\n"
    done = example("rerun_page").rerun(page, tmp_path)
    assert done == page.replace("old", "new").replace("pwd; false\n", "pwd; false\n.\n[exit code 1]\n")
    assert os.environ.get("EXAMPLES") is None
