import json
import multiprocessing
import os
import time

import pytest

from difftest.scale.locks import alive, build_once, exclusive, memory_lease

fork = multiprocessing.get_context("fork")
BUILD_SECONDS = 0.2


def _build(folder, log):
    with build_once("kernel 90a", folder) as first:
        with log.open("a") as lines:
            lines.write("build\n" if first else "use\n")
        if first:
            time.sleep(BUILD_SECONDS)


def test_one_builds_while_the_others_wait(tmp_path):
    log = tmp_path / "log"
    workers = [fork.Process(target=_build, args=(tmp_path, log)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert log.read_text().split() == ["build", "use", "use", "use"]


def _die(folder):
    with build_once("kernel 90a", folder):
        os._exit(9)


def test_a_builder_that_dies_leaves_the_build_to_the_next(tmp_path):
    worker = fork.Process(target=_die, args=(tmp_path,))
    worker.start()
    worker.join()
    with build_once("kernel 90a", tmp_path) as first:
        assert first


def test_a_failed_build_is_not_done(tmp_path):
    with pytest.raises(RuntimeError), build_once("kernel", tmp_path):
        raise RuntimeError("nvcc rejects it")
    with build_once("kernel", tmp_path) as first:
        assert first
    with build_once("kernel", tmp_path) as first:
        assert not first
    with build_once("another kernel", tmp_path) as first:
        assert first


def _hold(ledger, log, need):
    with memory_lease(need, 100, ledger):
        with exclusive(log.with_suffix(".lock")), log.open("a") as lines:
            lines.write(f"+{need}\n")
        time.sleep(BUILD_SECONDS / 4)
        with exclusive(log.with_suffix(".lock")), log.open("a") as lines:
            lines.write(f"-{need}\n")


def test_leases_never_exceed_the_capacity(tmp_path):
    ledger, log = tmp_path / "memory.json", tmp_path / "log"
    workers = [fork.Process(target=_hold, args=(ledger, log, need)) for need in (60, 50, 40, 300, 50, 60)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    held, most = 0, []
    for line in log.read_text().split():
        held += min(100, abs(int(line))) * (1 if line.startswith("+") else -1)
        most.append(held)
    assert len(most) == 12
    assert max(most) <= 100
    assert json.loads(ledger.read_text()) == {}


def test_leases_of_the_dead_are_free(tmp_path):
    gone = fork.Process(target=os._exit, args=(0,))
    gone.start()
    gone.join()
    assert not alive(gone.pid)
    ledger = tmp_path / "memory.json"
    ledger.write_text(json.dumps({str(gone.pid): 100}))
    with memory_lease(80, 100, ledger):
        assert json.loads(ledger.read_text()) == {str(os.getpid()): 80}
