"""The git commands that bisection needs, none of which touches the user's checkout, index, branches or stash."""

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from .trial import Refused

LOCAL = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_COMMON_DIR", "GIT_NAMESPACE")
"""Variables that git sets for hooks and aliases and that would point every git command at the wrong repository."""


@dataclass(frozen=True)
class Commit:
    """What a report says about a commit: `date` of authorship in ISO 8601, `files` changed against the first parent."""

    sha: str
    author: str
    date: str
    subject: str
    parents: tuple[str, ...]
    files: tuple[str, ...]


def git_environment() -> dict[str, str]:
    """This process's environment for git itself: English, without prompts, without a hook's variables."""
    environment = {name: value for name, value in os.environ.items() if name not in LOCAL}
    return {**environment, "LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0", "GIT_OPTIONAL_LOCKS": "0"}


@dataclass(frozen=True)
class Repository:
    """A git repository, bare or with a checkout; `root` is where its commands run."""

    root: Path

    @classmethod
    def open(cls, path: Path) -> Self:
        """The repository that `path` lies in. Refused if there is none, or git itself is missing."""
        if shutil.which("git") is None:
            raise Refused("git is not on PATH, and bisection drives it; install git 2.20 or newer")
        if not path.is_dir():
            raise Refused(f"{path} is not a directory; give the root of a git checkout")
        repository = cls(path)
        if repository.ask("rev-parse", "--is-bare-repository") == "true":
            return repository
        top = repository.ask("rev-parse", "--show-toplevel")
        if not top:
            raise Refused(f"{path} is not in a git repository; give a checkout, or compare releases with --package")
        return cls(Path(top))

    def run(self, *arguments: str, at: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Runs git without hooks; never raises for its exit code."""
        command = ["git", "-c", "core.hooksPath=/dev/null", "-c", "advice.detachedHead=false", *arguments]
        return subprocess.run(
            command, cwd=at or self.root, env=git_environment(), capture_output=True, text=True, errors="replace"
        )

    def ask(self, *arguments: str, at: Path | None = None) -> str:
        """Output of a question, empty if git cannot answer it."""
        done = self.run(*arguments, at=at)
        return done.stdout.strip() if done.returncode == 0 else ""

    def must(self, *arguments: str, at: Path | None = None) -> str:
        """Output of a command that has to work. RuntimeError with git's own words otherwise."""
        done = self.run(*arguments, at=at)
        if done.returncode:
            said = (done.stderr.strip() or done.stdout.strip()).splitlines()
            raise RuntimeError(f"git {' '.join(arguments[:2])} failed: {said[-1] if said else done.returncode}")
        return done.stdout.strip()

    def local_changes(self) -> list[str]:
        """Tracked files that differ from HEAD; untracked files do not count. Empty for a bare repository."""
        done = self.run("status", "--porcelain", "--untracked-files=no", "--ignore-submodules=dirty")
        return [line[3:] for line in done.stdout.splitlines()]

    def resolve(self, name: str, option: str) -> str:
        """Full hash of the commit that `name` means. Refused with the option that named it otherwise."""
        sha = "" if name.startswith("-") else self.ask("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
        if sha:
            return sha
        if not self.ask("rev-list", "--max-count=1", "--all"):
            raise Refused(f"{self.root} has no commit yet, so there is nothing to search")
        shallow = self.ask("rev-parse", "--is-shallow-repository") == "true"
        hint = (
            "this clone is shallow: `git fetch --unshallow` first" if shallow else "`git log` and `git tag` list them"
        )
        raise Refused(f"{option} {name} is no commit of {self.root}; {hint}")

    def is_ancestor(self, first: str, second: str) -> bool:
        return self.run("merge-base", "--is-ancestor", first, second).returncode == 0

    def commit(self, sha: str) -> Commit:
        """What the report says about `sha`."""
        text = self.must("show", "--no-patch", "--format=%H%x00%an <%ae>%x00%aI%x00%s%x00%P", sha)
        full, author, date, subject, parents = text.split("\0")
        trees = [parents.split()[0], full] if parents else ["--root", "--no-commit-id", full]
        files = self.must("diff-tree", "-r", "--name-only", *trees)
        return Commit(full, author, date, subject, tuple(parents.split()), tuple(files.splitlines()))

    def subject(self, sha: str) -> str:
        return self.ask("show", "--no-patch", "--format=%s", sha)

    def first_parents(self, sha: str) -> list[str]:
        """`sha` and its ancestors along the first parents, newest first."""
        return self.must("rev-list", "--first-parent", sha).splitlines()

    def last_change(self, sha: str, files: tuple[str, ...]) -> str:
        """Nearest ancestor of `sha` (or itself) that changed one of `files`; empty if none ever did."""
        return self.ask("log", "-1", "--format=%H", sha, "--", *files)

    def count(self, good: str, bad: str, files: tuple[str, ...] = ()) -> int:
        """Commits after `good` up to `bad`; with `files`, only those that changed one of them."""
        return int(self.must("rev-list", "--count", bad, f"^{good}", "--", *files))

    def add_worktree(self, folder: Path, sha: str) -> None:
        """Checks `sha` out into a new worktree, replacing one that an interrupted search left there."""
        self.remove_worktree(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        self.must("worktree", "add", "--force", "--detach", str(folder), sha)

    def remove_worktree(self, folder: Path) -> None:
        """Removes a worktree and all that git remembers of it. Nothing happens if there is none."""
        listed = self.ask("worktree", "list", "--porcelain").splitlines()
        if f"worktree {folder}" in listed or folder.exists():
            self.run("worktree", "remove", "--force", "--force", str(folder))
        if folder.exists():
            shutil.rmtree(folder)
            self.run("worktree", "remove", "--force", "--force", str(folder))
