"""The pytest plugin: options, one cached run a case and layer, and a summary that names the first divergence.

Only options and hooks live here; what runs is in `difftest.testing`, what is tested in `difftest.suite`.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .testing import Lab


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("difftest", "differential tests of sparse-attention indexers")
    group.addoption("--difftest-profile", default="smoke", help="which cases run: smoke, default, full or gpu")
    group.addoption("--difftest-case", action="append", default=[], help="run only this case (repeatable)")
    group.addoption("--difftest-path", action="append", default=[], help="run only this path (repeatable)")
    group.addoption("--difftest-layer", action="append", type=int, default=[], help="run only this layer (repeatable)")
    group.addoption("--difftest-device", default="auto", choices=("auto", "cpu", "cuda"), help="where paths run")
    group.addoption("--difftest-policy", default="default", help="strict, default, exploratory or a TOML file")
    group.addoption("--difftest-seed", type=int, default=0, help="added to every case's seed")
    group.addoption("--difftest-out", default=None, help="new directory for run.json and records.jsonl")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "difftest: a differential test; its records go to --difftest-out")
    workers = getattr(config.option, "numprocesses", None)
    if workers and getattr(config.option, "dist", "no") == "load":
        config.option.dist = "loadgroup"  # tests of one case and layer share inputs, so one worker gets them all


def _is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    out = session.config.getoption("--difftest-out")
    if out and not _is_worker(session.config):
        from .environment import environment
        from .run_dir import RunDir

        try:
            RunDir.create(Path(out), environment=environment(), made_by="pytest")
        except FileExistsError as error:
            raise pytest.UsageError(str(error)) from error


@pytest.fixture(scope="session")
def difftest_lab(request: pytest.FixtureRequest) -> "Lab":
    """Runs cases through paths, each case and layer once, and judges single stages of them."""
    from .testing import Lab

    option = request.config.getoption
    out = option("--difftest-out")
    worker = getattr(request.config, "workerinput", {}).get("workerid", "")
    return Lab(
        device=option("--difftest-device"),
        policy=option("--difftest-policy"),
        records=Path(out) / (f"records-{worker}.jsonl" if worker else "records.jsonl") if out else None,
    )


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    out = session.config.getoption("--difftest-out")
    if out and not _is_worker(session.config):
        from .testing import gather

        gather(Path(out), session.config.getoption("--difftest-policy"), interrupted=exitstatus == 2)
