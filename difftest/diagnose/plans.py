"""What a search was asked for, as data: written into its state file, read again by `--resume`."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from .sequential import SequentialTest
from .trial import Command, Refused

Repeat = Literal["auto", "always", "never"]


@dataclass(frozen=True)
class CommitPlan:
    """What to search: a repository, its endpoints, how a commit is built and how it is judged.

    good    a commit that passes; empty looks for one, going back from `bad` in doubling steps.
    build   shell command run in the tree after every checkout; a failure skips the commit.
    only    paths: a commit that changes none of them has the verdict of its nearest ancestor that does.
    repeat  auto: repeat seeds once the verdict comes out both ways for one commit. always, never: as they say.
    venv    builds and verdicts see a throw-away virtual environment laid over the running one.
    clean   remove ignored and untracked files (old build outputs) before every build.
    """

    repository: Path
    command: Command
    good: str = ""
    bad: str = "HEAD"
    build: str = ""
    build_timeout: float = 0.0
    only: tuple[str, ...] = ()
    repeat: Repeat = "auto"
    test: SequentialTest = field(default_factory=SequentialTest)
    venv: bool = False
    clean: bool = False
    ignore_local_changes: bool = False


@dataclass(frozen=True)
class VersionPlan:
    """What to search: the released versions of a package between `good` and `bad`, and how one is judged.

    overlay  versions are laid over the running environment, whose packages (difftest, torch) they see; otherwise every
             environment is empty but for the package, what it needs, and `extra` requirements.
    sources  options for pip: --find-links, --no-index, --index-url, --pre.
    keep     keep the environments instead of removing each one after its verdict.
    """

    package: str
    good: str
    bad: str
    command: Command
    overlay: bool = False
    extra: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    test: SequentialTest = field(default_factory=SequentialTest)
    repeat: bool = False
    keep: bool = False


def plan_to_json(plan: CommitPlan | VersionPlan) -> dict[str, Any]:
    """The plan as JSON values, with its `kind`."""
    kind = "commit" if isinstance(plan, CommitPlan) else "version"
    values: dict[str, Any] = json.loads(json.dumps({"kind": kind, **asdict(plan)}, default=str))
    return values


def plan_from_json(raw: dict[str, Any]) -> CommitPlan | VersionPlan:
    """The plan that `plan_to_json` wrote. Refused if it is none."""
    try:
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in raw.items()
        }
        kind = values.pop("kind")
        values["command"] = Command(**values["command"])
        values["test"] = SequentialTest(**values["test"])
        if kind == "version":
            return VersionPlan(**values)
        return CommitPlan(**{**values, "repository": Path(values["repository"])})
    except (KeyError, TypeError, AttributeError) as error:
        raise Refused(f"the state file holds no plan of a bisection ({error!r}); start a new search") from error
