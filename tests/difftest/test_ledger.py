from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from difftest import ledger
from difftest.ledger import LEDGER, Bench, Outcome
from difftest.paths.transformers_adapter import Transformers

MISSING = Transformers().availability()
pytestmark = pytest.mark.skipif(not MISSING.ok, reason=f"{MISSING.why}: {MISSING.install}")


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Bench()
    torch.set_num_threads(threads)


@pytest.mark.parametrize("entry", LEDGER, ids=lambda entry: entry.name)
def test_a_difference_is_as_known(entry: ledger.Entry, bench: Bench) -> None:
    outcome = Outcome(entry, entry.measure(bench))
    assert outcome.state == "as known", str(outcome)


def test_entries_have_names_of_their_own() -> None:
    assert len({entry.name for entry in LEDGER}) == len(LEDGER)


def test_a_vanished_difference_is_told(bench: Bench) -> None:
    """As if the modules transformed their keys: the entry that measures the omission finds nothing."""
    entry = next(entry for entry in LEDGER if entry.name == "hadamard-absent")
    size = ledger.relative(bench.stage("index_k", bench.oracle), bench.oracle.value("index_k"))
    assert Outcome(entry, size).state == "vanished"


def test_a_new_difference_is_told(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the scorer dropped its ReLU."""
    module = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    monkeypatch.setattr(module.F, "relu", lambda x: x)
    entry = next(entry for entry in LEDGER if entry.name == "structure-score-value")
    assert Outcome(entry, entry.measure(bench)).state == "grown"


def test_an_entry_without_slack_is_exact(bench: Bench) -> None:
    entry = next(entry for entry in LEDGER if entry.name == "structure-topk")
    assert [Outcome(entry, size).state for size in (0.0, 1.0)] == ["as known", "grown"]
    assert Outcome(replace(entry, measured=2.0), 1.0).state == "vanished"
