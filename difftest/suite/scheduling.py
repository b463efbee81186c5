"""Distribution of units over pytest-xdist's workers that survives the death of any of them."""

from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

from ..scale.shards import unit_of_id


class UnitScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """All tests of a unit to one worker, as they share a run; a dead worker's unfinished tests go to the others.

    pytest-xdist 3.8 hands a dead worker's finished groups out again, after which the next worker waits for ever, and
    runs the test that killed the worker once more. Here both are done with: the fatal test has failed, its unit's other
    tests run elsewhere.
    """

    def _split_scope(self, nodeid: str) -> str:
        return unit_of_id(nodeid) or nodeid

    def remove_node(self, node: WorkerController) -> str | None:
        """Takes a dead node's work back and returns the test it was at, None if it had finished."""
        workload = self.assigned_work.pop(node)
        unfinished = {scope: tests for scope, tests in workload.items() if not all(tests.values())}
        if not unfinished:
            return None
        tests = next(iter(unfinished.values()))
        fatal: str = next(nodeid for nodeid, completed in tests.items() if not completed)
        tests[fatal] = True
        waiting = {scope: rest for scope, rest in unfinished.items() if not all(rest.values())}
        for scope in reversed(waiting):
            self._put_back(scope, waiting[scope])
        for other in self.nodes:
            self._reschedule(other)
        return fatal

    def _reschedule(self, node: WorkerController) -> None:
        if node in self.registered_collections:  # a replacement that has not collected yet cannot take work
            super()._reschedule(node)

    def _assign_work_unit(self, node: WorkerController) -> None:
        scope, tests = next(iter(self.workqueue.items()))
        try:
            super()._assign_work_unit(node)
        except OSError:  # the node is dead, and the event that says so is on its way
            self.assigned_work[node].pop(scope, None)
            self._put_back(scope, tests)

    def _put_back(self, scope: str, tests: dict[str, bool]) -> None:
        self.workqueue[scope] = tests
        self.workqueue.move_to_end(scope, last=False)
