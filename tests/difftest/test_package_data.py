"""Every file that the package needs beside its modules is named in pyproject.toml, so that the wheel has it too."""

import tomllib
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
TOOLS = SETTINGS["tool"]["setuptools"]
NOT_SHIPPED = {".py", ".pyc", ".md"}


def folder(package):
    """The folder of a package, by the mapping of `package-dir`."""
    for name in sorted(TOOLS["package-dir"], key=len, reverse=True):
        if package == name or package.startswith(f"{name}."):
            return ROOT / TOOLS["package-dir"][name] / package[len(name) + 1 :].replace(".", "/")
    return ROOT / package.replace(".", "/")


@pytest.mark.parametrize("package", TOOLS["packages"])
def test_data_files_are_in_the_wheel(package):
    here, others = folder(package), {folder(other) for other in TOOLS["packages"]}
    for file in here.rglob("*"):
        owner = next(parent for parent in file.parents if parent in others)
        if not file.is_file() or owner != here or file.suffix in NOT_SHIPPED or "__pycache__" in file.parts:
            continue
        name = file.relative_to(here).as_posix()
        patterns = TOOLS["package-data"]["*"]
        assert any(fnmatchcase(name, pattern) for pattern in patterns), f"{file} is not in package-data"


def test_what_the_package_says_of_itself():
    project = SETTINGS["project"]
    assert project["license"] == "Apache-2.0" and (ROOT / "LICENSE").read_text().lstrip().startswith("Apache License")
    assert {"sglang", "report", "ci", "cluster", "docs"} <= set(project["optional-dependencies"])
    assert f"## {project['version']}" in (ROOT / "CHANGELOG.md").read_text()
