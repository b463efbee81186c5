"""Sphinx configuration: the Markdown pages, and an API reference made from the docstrings."""

import re
from importlib.metadata import version as installed

project = "difftest"
author = "the difftest authors"
release = version = installed("difftest")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["examples/**", "site/**"]
html_theme = "furo"
html_title = f"difftest {release}"
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]
nitpicky = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
linkcheck_timeout = 15
linkcheck_retries = 2

COLUMNS = re.compile(r"\S {2,}\S")
CODE = re.compile(r"`([^`\n]+)`")
SPECIAL = re.compile(r"([*|\\]|_(?=\W|$))")


def plain_docstring(app: object, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Docstrings are plain text here: paragraphs stay so, aligned columns and indented parts are kept as they are."""
    made: list[str] = []
    for paragraph in _paragraphs(lines):
        if any(COLUMNS.search(line) or line.startswith(" ") for line in paragraph):
            made += ["::", "", *(f"    {line}" for line in paragraph), ""]
        else:
            made += [*(_escape(line) for line in paragraph), ""]
    lines[:] = made


def _paragraphs(lines: list[str]) -> list[list[str]]:
    found: list[list[str]] = [[]]
    for line in lines:
        if line.strip():
            found[-1].append(line)
        elif found[-1]:
            found.append([])
    return [paragraph for paragraph in found if paragraph]


def _escape(line: str) -> str:
    """`code` as literal text, and what reStructuredText would read as markup as itself."""
    parts = CODE.split(line)
    return "".join(f"``{part}``" if number % 2 else SPECIAL.sub(r"\\\1", part) for number, part in enumerate(parts))


def setup(app: object) -> None:
    app.connect("autodoc-process-docstring", plain_docstring)  # type: ignore[attr-defined]
