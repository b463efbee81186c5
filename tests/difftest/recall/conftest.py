"""Fixtures of the live-server tests."""

import importlib.util
import sys
from pathlib import Path

_NAME = "difftest_chat_server"
_SPEC = importlib.util.spec_from_file_location(_NAME, Path(__file__).parent / "chat_server.py")
assert _SPEC and _SPEC.loader
sys.modules[_NAME] = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(sys.modules[_NAME])
