"""The pytest plugin: options, and workers pinned to GPUs. What a session of the suite does is in `suite/hooks.py`.

Importing this costs every pytest run of an environment that has difftest installed, so nothing heavy is imported here.
"""

from typing import TYPE_CHECKING, Any, cast

import pytest

from .suite.hooks import Hooks

if TYPE_CHECKING:
    from collections.abc import Callable

    from .cases.case import Case
    from .paths.base import Path
    from .record import Record
    from .suite.lab import Lab

SUITE = ("difftest.suite", "difftest/suite")


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
    group.addoption("--difftest-budget", default=None, help="time to spend, as 90s or 6m; what does not fit is listed")
    group.addoption(
        "--difftest-kill-matrix", default=None, help="what --difftest-budget orders by, if not the shipped one"
    )
    group.addoption(
        "--difftest-workers-per-gpu", default="auto", help="workers of -n auto on each GPU: a number, or auto by memory"
    )
    group.addoption(
        "--difftest-pin",
        default="auto",
        choices=("auto", "always", "never"),
        help="give each worker of -n one GPU of CUDA_VISIBLE_DEVICES: auto does when the arguments name the suite",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "difftest: a differential test; its records go to --difftest-out")
    hooks = Hooks(config)
    config.pluginmanager.register(hooks, "difftest-session")
    workers = getattr(config.option, "numprocesses", None)
    if hooks.worker or not workers or not _names_suite(config):
        return
    hooks.distributes = config.option.dist in ("load", "loadgroup")
    config.option.loadscopereorder = False
    if _pins(config):
        from .scale.workers import specs, visible_gpus

        gpus = visible_gpus()
        if gpus:
            config.option.tx = specs(gpus, len(config.option.tx))
            tokens = ", ".join(gpu.token for gpu in gpus)
            hooks.notes.append(f"{len(config.option.tx)} workers, each on one of {len(gpus)} GPUs: {tokens}")


def _names_suite(config: pytest.Config) -> bool:
    """Whether the arguments name the suite: other people's tests keep their devices and their distribution."""
    named = any(part in argument for argument in config.args for part in SUITE)
    return named or bool(config.getoption("--difftest-pin") == "always")


def _pins(config: pytest.Config) -> bool:
    return bool(config.getoption("--difftest-pin") != "never" and config.getoption("--difftest-device") != "cpu")


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Workers of `-n auto`: by the memory of the GPUs and what the largest chosen case needs of it."""
    if not (_names_suite(config) and _pins(config)):
        return None
    from .scale.workers import count, largest_need, visible_gpus

    gpus = visible_gpus()
    if not gpus:
        return None
    option = config.getoption
    wanted = option("--difftest-workers-per-gpu")
    if wanted == "auto":
        need = largest_need(option("--difftest-profile"), option("--difftest-case"), option("--difftest-layer"))
        return count(gpus, need)
    if not wanted.isdigit() or not int(wanted):
        raise pytest.UsageError(f"--difftest-workers-per-gpu {wanted!r} is no number: give 1, 2, ... or auto")
    return len(gpus) * int(wanted)


@pytest.fixture(scope="session")
def difftest_lab(request: pytest.FixtureRequest) -> "Lab":
    """Runs cases through paths, each case and layer once, and judges single stages of them."""
    from .suite.lab import Lab

    hooks = cast(Hooks, request.config.pluginmanager.get_plugin("difftest-session"))
    option = request.config.getoption
    return Lab(option("--difftest-device"), option("--difftest-policy"), hooks.records, hooks.scratch)


@pytest.fixture
def assert_agrees(request: pytest.FixtureRequest) -> "Callable[..., list[Record]]":
    """`difftest.testing.assert_agrees` on the command line's device and policy; skips where nothing can be judged."""

    def check(path: "str | Path", case: "str | Case", **rest: Any) -> "list[Record]":
        from .testing import CannotJudge, assert_agrees

        __tracebackhide__ = True
        option = request.config.getoption
        try:
            return assert_agrees(
                path, case, device=option("--difftest-device"), policy=option("--difftest-policy"), **rest
            )
        except CannotJudge as why:
            pytest.skip(f"cannot judge: {why}")

    return check
