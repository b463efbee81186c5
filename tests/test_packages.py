"""What is installed is what is here, under names that nobody else uses."""

import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = {
    "difftest": "difftest",
    "difftest.reference": "reference",
    "difftest.kernels": "kernels",
    "difftest.cases": "cases",
}


def test_every_package_is_listed() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = set()
    for package, folder in FOLDERS.items():
        for file in (ROOT / folder).rglob("__init__.py"):
            parts = file.parent.relative_to(ROOT / folder).parts
            found.add(".".join((package, *parts)))
    assert set(settings["packages"]) == found
    assert settings["package-dir"] == FOLDERS


def test_hugging_faces_kernels_package_and_ours_both_import() -> None:
    pytest.importorskip("kernels", reason="Hugging Face's kernels package is not installed: pip install kernels")
    import difftest.kernels.layout

    import kernels

    assert find_spec("kernels") is not None and hasattr(kernels, "get_kernel")
    assert "get_kernel" not in vars(difftest.kernels) and difftest.kernels.__name__ == "difftest.kernels"
