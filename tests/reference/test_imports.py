import ast
import sys
from pathlib import Path

import pytest
from difftest.reference import config

FILES = sorted(Path(str(config.__file__)).parent.glob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_reference_imports_only_torch_and_itself(file: Path) -> None:
    """So that it shares no code with any path under test."""
    outside = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            outside |= {name.name.split(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level != 1:
            outside.add((node.module or "..").split(".")[0] if node.level == 0 else "..")
    assert outside <= {"torch", *sys.stdlib_module_names}
