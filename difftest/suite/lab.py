"""Cached runs behind the pytest suite: each case and layer runs once a worker, and its stages are judged one by one."""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path as File

from ..cases.case import Case
from ..environment import package_version
from ..paths.base import Path, get_path
from ..record import Record, append_records, read_records
from ..runner import Plan, Result, covers, run_layer
from ..scale.accounts import PARTS, Running, killed, killed_record
from ..scale.locks import build_once, memory_lease
from ..scale.needs import memory_bytes
from ..scale.workers import MEMORY
from ..stages import StageName
from ..testing import CannotJudge, check_records, resolve_device
from ..verdict import CRASH, load_policy

BUILT_BY = ("torch", "triton", "sglang", "sgl-deep-gemm", "sgl-flash-mla", "sglang-kernel", "difftest")
"""Packages whose versions decide what a path builds just in time."""

WORKER, POISONED = "PYTEST_XDIST_WORKER", 70
CUDA_ERROR = "CUDA error"
"""How torch names a fault of the device (an illegal address, an assertion) that only a new process recovers from."""


@dataclass
class Lab:
    """Runs each (case, layer) once for the plan's paths and keeps the last; the suite asks it stage by stage.

    scratch  folder shared by the workers of a host: notes of what each is at, and the memory ledger.
    """

    device: str = "auto"
    policy: str = "default"
    records: File | None = None
    scratch: File | None = None
    _key: tuple[str, int] | None = field(default=None, init=False)
    _records: dict[str, list[Record]] = field(default_factory=dict, init=False)

    def run(self, plan: Plan, case: Case, layer: int) -> dict[str, list[Record]]:
        """Records by path spec, running the case and layer through all paths of the plan if it is not the one at hand.

        A path at which an earlier worker died on this case and layer is not run again: it gets a `crash` record.
        """
        if self._key == (case.id, layer):
            return self._records
        self._records, self._key = {}, (case.id, layer)
        specs = {get_path(spec).name: spec for spec in plan.paths}
        ready = [path for path in map(get_path, plan.paths) if path.availability().ok and covers(path, case, layer)]
        dead = killed(self.scratch) if self.scratch else set()
        for path in [path for path in ready if (case.id, layer, path.name) in dead]:
            ready.remove(path)
            told = self._told_before(case.id, layer, path.name)
            self._records[specs[path.name]] = told
            if not told:
                self._keep(specs[path.name], [killed_record(case.id, layer, case.config.kind(layer), path.name)])
        try:
            for path, result in self._results(plan, case, layer, ready):
                self._keep(specs[path.name], result.records)
                if _poisoned(result.records):
                    _end_worker()
        except RuntimeError as error:  # a fault of the device may show only when the judge reads what a path left
            if CUDA_ERROR in str(error):
                _end_worker()
            raise
        return self._records

    def _told_before(self, case: str, layer: int, path: str) -> list[Record]:
        """What a worker that has died could still record of a path, if it recorded that the path crashed."""
        assert self.scratch is not None
        files = sorted(self.scratch.glob(PARTS))
        told = [
            one
            for file in files
            for one in read_records(file)
            if (one.case, one.layer, one.path) == (case, layer, path)
        ]
        return told if any(finding.rule == CRASH for one in told for finding in one.findings) else []

    def _results(self, plan: Plan, case: Case, layer: int, ready: Sequence[Path]) -> Iterator[tuple[Path, Result]]:
        device = resolve_device(self.device)
        note = Running(self.scratch, os.getpid()) if self.scratch else None
        with ExitStack() as held:
            if device == "cuda" and self.scratch and os.environ.get(MEMORY):
                ledger = self.scratch / f"memory-{os.environ.get('CUDA_VISIBLE_DEVICES', 'all')}.json"
                held.enter_context(memory_lease(memory_bytes(case, layer), int(os.environ[MEMORY]), ledger))
                held.callback(_free_cached_memory)
            results = run_layer(case, layer, ready, device, plan.captured.get((case.id, layer)))
            for path in ready:
                if note:
                    note.start(case.id, layer, path.name)
                with _builder(path, device):
                    result = next(results)
                yield path, result
                if note:
                    note.stop()

    def _keep(self, spec: str, records: list[Record]) -> None:
        self._records[spec] = records
        if self.records:
            append_records(self.records, records)

    def stage(self, plan: Plan, case: Case, layer: int, spec: str, stage: StageName) -> list[Record]:
        """Records of one stage of one path. CannotJudge if the path has none."""
        found = self.run(plan, case, layer).get(spec)
        if found is None:
            raise CannotJudge(f"path {spec} has nothing to say about {case.id} layer {layer}")
        records = [record for record in found if record.stage == stage]
        if not records:
            ended = next((record.stage for record in found if record.findings or record.skipped), None)
            raise CannotJudge(f"{spec} stopped at stage {ended} before {stage}")
        return records

    def check(self, records: list[Record]) -> None:
        """Raises AssertionError or CannotJudge as the policy says of these records."""
        check_records(records, load_policy(self.policy))


def _end_worker() -> None:
    """Ends a pytest-xdist worker. The note of its path stays, so the worker that replaces it passes that path over."""
    if WORKER in os.environ:
        os._exit(POISONED)


def _poisoned(records: Sequence[Record]) -> bool:
    """Whether a path has left this process's CUDA context unusable: every later kernel would fail too."""
    return any(one.rule == CRASH and CUDA_ERROR in one.message for record in records for one in record.findings)


def _free_cached_memory() -> None:
    """Gives memory that torch keeps for later back to the GPU, where the next worker's case needs it."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextmanager
def _builder(path: Path, device: str) -> Iterator[None]:
    """On a GPU, one process of the host at a time runs a path for the first time: the others wait for its builds."""
    if device != "cuda":
        yield
        return
    import torch

    versions = [f"{name} {package_version(name)}" for name in BUILT_BY]
    with build_once("; ".join([path.name, torch.cuda.get_device_name(), *versions])):
        yield
