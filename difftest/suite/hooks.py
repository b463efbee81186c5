"""What a session of the suite does around its tests: selection, the account of what ran, exit code and summary.

Registered in every pytest run, so it imports nothing heavy before the suite's own tests are collected.
"""

import json
import tempfile
import time
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .gather import Gathered
    from .selection import Selection

CANNOT_JUDGE = 125
SCRATCH = "difftest_scratch"
FACTS, LEFT, PLANNED = "session.json", "left-out.jsonl", "planned.json"
SHOWN = 12
"""Left-out units and stages that the summary names; it counts the rest."""


class Hooks:
    """State and hooks of one process of a session.

    `scratch` is the run directory, or a temporary one without --difftest-out; a controller shares it with its workers.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.worker = hasattr(config, "workerinput")
        self.started = time.monotonic()
        self.notes: list[str] = []
        self.selection: Selection | None = None
        self.gathered: Gathered | None = None
        self.crashed: set[str] = set()
        self.judged = 0
        self.distributes = False
        self.begun: set[str] = set()

    @cached_property
    def scratch(self) -> Path:
        given = getattr(self.config, "workerinput", {}).get(SCRATCH) or self.config.getoption("--difftest-out")
        if given:
            return Path(given)
        self.temporary = tempfile.TemporaryDirectory(prefix="difftest-")
        return Path(self.temporary.name)

    @property
    def records(self) -> Path:
        worker = getattr(self.config, "workerinput", {}).get("workerid", "main")
        return self.scratch / f"records-{worker}.jsonl"

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput[SCRATCH] = str(self.scratch.absolute())

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Any:
        if not self.distributes:
            return None
        from .scheduling import UnitScheduling

        return UnitScheduling(config, log)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        out = session.config.getoption("--difftest-out")
        if out and not self.worker:
            from ..environment import environment
            from ..run_dir import RunDir

            try:
                RunDir.create(Path(out), environment=environment(), made_by="pytest")
            except FileExistsError as error:
                raise pytest.UsageError(str(error)) from error

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if not any("difftest_plan" in getattr(item, "fixturenames", ()) for item in items):
            return
        from .selection import select

        self.selection = select(config, items)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Leaves plan and selection where the end of the session finds them; workers that collect later leave them."""
        if self.selection is None or session.config.option.collectonly:
            return
        from ..scale.accounts import write_once
        from .selection import facts, planned_of

        write_once(self.scratch / PLANNED, planned_of(session.items))
        write_once(self.scratch / FACTS, [facts(session.config, self.selection)])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Leaves out units that would begin after the budget is spent."""
        choice = self.selection.choice if self.selection else None
        if choice is None:
            return
        from .selection import unit_of

        unit, spent = unit_of(item), time.monotonic() - self.started
        if not unit or unit in self.begun:
            return
        if spent > choice.budget and self.begun:
            with (self.scratch / LEFT).open("a") as lines:
                lines.write(json.dumps({"name": unit, "seconds": choice.cost(unit)}) + "\n")
            pytest.skip(f"left out: {spent:.0f} s of the budget of {choice.budget:.0f} s are spent")
        self.begun.add(unit)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and "difftest" in report.keywords and report.outcome in ("passed", "failed"):
            self.judged += 1

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str, report: pytest.TestReport, sched: Any) -> None:
        from ..scale.shards import unit_of_id

        self.crashed.add(unit_of_id(crashitem))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Joins and judges the records. A session that judged nothing, or lost a case, does not end with code 0."""
        if self.worker or not (self.scratch / PLANNED).is_file():
            return
        from .gather import gather

        policy, out = (session.config.getoption(f"--difftest-{name}") for name in ("policy", "out"))
        self.gathered = gather(self.scratch, policy, exitstatus == 2, out, self.crashed)
        if exitstatus == 0 and (not self.judged or self.gathered.not_run):
            session.exitstatus = CANNOT_JUDGE

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.gathered is None:
            return
        terminalreporter.section("difftest")
        for line in [*self.notes, *self.gathered.lines(SHOWN)]:
            terminalreporter.write_line(line)

    def pytest_unconfigure(self) -> None:
        if hasattr(self, "temporary"):
            self.temporary.cleanup()
