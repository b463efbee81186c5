"""Throw-away virtual environments: one for every build of a search, or one a released version."""

import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

from .git import LOCAL
from .trial import CannotJudge

OVERLAY = "_overlay.pth"
"""Sorts after `__editable__*.pth`: an editable install in the overlay wins over one in the environment below."""


def plain_environment() -> dict[str, str]:
    """This process's environment for builds and verdicts.

    Without a hook's git variables, and without writing byte code: two files written in the same second and of one size
    look alike to Python's cache, and the second would run the first one's code.
    """
    environment = {name: value for name, value in os.environ.items() if name not in LOCAL}
    return {**environment, "PYTHONDONTWRITEBYTECODE": "1"}


def venv_environment(folder: Path) -> dict[str, str]:
    """`plain_environment` with the virtual environment in `folder` activated."""
    environment = plain_environment()
    environment.pop("PYTHONHOME", None)
    path = os.pathsep.join([str(folder / "bin"), environment.get("PATH", os.defpath)])
    return {**environment, "VIRTUAL_ENV": str(folder), "PATH": path}


def make_venv(folder: Path, overlay: bool) -> Path:
    """Makes a virtual environment and returns its interpreter.

    overlay: packages of the running environment are seen through it, those installed here hide them. Its `pip` is the
    running environment's, so it takes a tenth of a second. CannotJudge if none can be made.
    """
    done = subprocess.run(
        [sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder)], capture_output=True, text=True
    )
    if done.returncode:
        raise CannotJudge(f"no virtual environment could be made in {folder}: {(done.stderr or done.stdout).strip()}")
    python = folder / "bin" / "python"
    if overlay:
        site = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))
        below = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
        (site / OVERLAY).write_text("import site; " + "; ".join(f"site.addsitedir({path!r})" for path in below) + "\n")
    shim = folder / "bin" / "pip"
    shim.write_text(f'#!/bin/sh\nexec {" ".join(map(shlex.quote, pip_command(python)))} "$@"\n')
    shim.chmod(0o755)
    return python


def pip_command(python: Path) -> list[str]:
    """The running environment's pip, installing for the interpreter `python`."""
    return [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
