import os

import pytest
from difftest.cases import registry
from difftest.cases.case import Case

import difftest.suite.gather
import difftest.suite.lab
import difftest.suite.selection  # noqa: F401  loaded here, so that runs in this process do not load torch each time

QUICK = ("--pyargs", "difftest.suite", "-p", "no:cacheprovider", "--difftest-device", "cpu")
TINY = (
    Case("tiny-9", "gaussian", (9,), rows=2, layers=(0, 1), brief=2, profiles=("smoke",)),
    Case("tiny-300", "gaussian", (300,), "decode", decode_tokens=2, rows=2, layers=(3,), profiles=("smoke",)),
)
PLUGIN = """
from difftest.cases import registry
from difftest.cases.case import Case

registry.CASES = tuple(map(Case.from_json, {cases!r}))
"""


@pytest.fixture
def suite(pytester, monkeypatch):
    """Runs the suite on two tiny cases with the oracle alone, in this process unless told otherwise."""
    monkeypatch.setattr(registry, "CASES", TINY)
    pytester.path.joinpath("tinycases.py").write_text(PLUGIN.format(cases=[case.to_json() for case in TINY]))
    monkeypatch.setenv("PYTHONPATH", f"{pytester.path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def run(*options, separate=False, path="oracle", **rest):
        options = (*QUICK, "--difftest-path", path, *options)
        if separate:
            return pytester.runpytest_subprocess("-p", "tinycases", *options, **rest)
        return pytester.runpytest_inprocess(*options, **rest)

    return run
