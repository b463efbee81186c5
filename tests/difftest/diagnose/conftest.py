"""Real git repositories, made on the spot."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from difftest.diagnose.bisect import bisect_commits
from difftest.diagnose.ledger import Ledger
from difftest.diagnose.outcome import Outcome
from difftest.diagnose.plans import CommitPlan, plan_to_json
from difftest.diagnose.trial import Command

WHO = "Ada Lovelace <ada@example.org>"
FIRST_SECOND = 1_700_000_000
BUG = "! grep -q bug code.txt"


@dataclass
class History:
    """Writes commits with `git fast-import`: hundreds of them in a fraction of a second."""

    root: Path
    stream: list[str] = field(default_factory=list)
    files: list[dict[str, str]] = field(default_factory=list)

    def commit(self, subject: str, change: dict[str, str | None], parents: list[int] | None = None) -> int:
        """Adds a commit and returns its mark. In `change` None deletes a file; the parent is the last commit."""
        mark = len(self.files) + 1
        parents = [mark - 1] if parents is None and mark > 1 else parents or []
        files = dict(self.files[parents[0] - 1]) if parents else {}
        if len(parents) > 1:
            files |= {name: text for other in parents[1:] for name, text in self.files[other - 1].items()}
        files |= {name: text for name, text in change.items() if text is not None}
        files = {name: text for name, text in files.items() if change.get(name, "") is not None}
        self.files.append(files)
        lines = ["reset refs/heads/main"] if not parents and mark > 1 else []
        lines += ["commit refs/heads/main", f"mark :{mark}", f"author {WHO} {FIRST_SECOND + 60 * mark} +0000"]
        lines += [f"committer {WHO} {FIRST_SECOND + 60 * mark} +0000", f"data {len(subject.encode())}", subject]
        lines += [f"{'from' if number == 0 else 'merge'} :{parent}" for number, parent in enumerate(parents)]
        lines.append("deleteall")
        for name, text in files.items():
            lines += [f"M 100644 inline {name}", f"data {len(text.encode())}", text]
        self.stream.append("\n".join(lines) + "\n")
        return mark

    def linear(self, commits: int, bug_at: int) -> "Repo":
        """`commits` commits; number `bug_at` turns code.txt from fine to bug, the others change other files."""
        for number in range(1, commits + 1):
            name = f"bug{number}.txt" if number == bug_at else f"note{number % 7}.txt"
            change: dict[str, str | None] = {name: f"{number}\n"}
            if number == 1:
                change["quiet.txt"] = "never changed\n"
            if number in (1, bug_at):
                change["code.txt"] = "bug\n" if number == bug_at else "fine\n"
            self.commit(f"change {number}", change)
        return self.write()

    def write(self) -> "Repo":
        """Creates the repository with `main` checked out at the last commit."""
        self.root.mkdir(parents=True)
        git(self.root, "init", "--quiet", "--initial-branch=main")
        marks = self.root / ".git" / "marks"
        subprocess.run(
            ["git", "fast-import", "--quiet", f"--export-marks={marks}"],
            cwd=self.root, input="\n".join(self.stream).encode(), check=True,
        )  # fmt: skip
        git(self.root, "reset", "--quiet", "--hard")
        pairs = [line.split() for line in marks.read_text().splitlines()]
        marks.unlink()
        return Repo(self.root, {int(mark[1:]): sha for mark, sha in pairs})


@dataclass(frozen=True)
class Repo:
    root: Path
    sha: dict[int, str]

    def state(self) -> str:
        """Everything a search must leave alone: HEAD, refs, status, index and worktrees."""
        asked = (
            ["symbolic-ref", "HEAD"],
            ["for-each-ref"],
            ["status", "--porcelain"],
            ["worktree", "list"],
            ["stash", "list"],
        )
        return "\n".join(git(self.root, *question) for question in (*asked, ["ls-files", "--stage"]))


def git(root: Path, *arguments: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    done = subprocess.run(["git", *arguments], cwd=root, env=environment, capture_output=True, text=True, check=True)
    return done.stdout


@pytest.fixture
def history(tmp_path: Path) -> History:
    return History(tmp_path / "repository")


def search_commits(
    repo: Repo, folder: Path, line: str = BUG, say: Callable[[str], None] = lambda _: None, **options: Any
) -> Outcome:
    """Searches `repo` with the state in `folder`; options are those of a plan."""
    plan = CommitPlan(repo.root, options.pop("command", None) or Command(line), **options)
    return bisect_commits(plan, Ledger.create(folder, plan_to_json(plan)), say)


@pytest.fixture
def search() -> Callable[..., Outcome]:
    return search_commits


FAULTY = {
    "no-hadamard": "NoHadamard",
    "entry-as-position": "EntryAsPosition",
    "bias-phase": "BiasPhase",
    "no-relu": "NoRelu",
    "rounded-score": "RoundedScore",
    "loses-last": "LosesLast",
    "page-edge": "PageEdge",
    "no-sink": "NoSink",
    "second-request-crashes": "SecondRequestCrashes",
    "full-width-only": "FullWidthOnly",
    "flaky": "Flaky",
    "neighbours-key": "NeighboursKey",
}


def install_paths(folder: Path, module: Path, paths: dict[str, str]) -> Path:
    """Puts `module` and an entry point for each of its path classes into `folder`, as an installed package has them."""
    info = folder / f"{module.stem}.egg-info"
    info.mkdir(parents=True)
    shutil.copy(module, folder)
    (info / "PKG-INFO").write_text(f"Metadata-Version: 2.1\nName: {module.stem}\nVersion: 0.1\n")
    lines = [f"{name} = {module.stem}:{kind}" for name, kind in paths.items()]
    (info / "entry_points.txt").write_text("\n".join(["[difftest.paths]", *lines, ""]))
    return folder


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder with `faulty_paths`, importable here and in subprocesses; FAULTY names its paths."""
    module = Path(__file__).with_name("faulty_paths.py")
    folder = install_paths(tmp_path_factory.mktemp("faulty") / "site", module, FAULTY)
    sys.path.insert(0, str(folder))
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *([before] if before else [])])
    yield folder
    sys.path.remove(str(folder))
    os.environ.pop("PYTHONPATH")
    if before:
        os.environ["PYTHONPATH"] = before
