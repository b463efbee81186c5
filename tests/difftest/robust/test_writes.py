"""The robustness checks of stores, queries and paths: what is right passes, and every check finds its fault."""

import json
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from difftest.kernels import query, store
from torch import Tensor
from typer.testing import CliRunner

from difftest.cli import app
from difftest.robust import paths, writes
from difftest.robust.finding import verdict
from difftest.robust.writes import check_query, check_store, operands
from difftest.trace import Trace

RUNS = 4


def store_faults(kernel: Callable[..., None]) -> dict[str, str]:
    return {v.rule: v.why for v in check_store("planted", kernel, operands("cpu"), "cpu", RUNS) if v.answer == "bug"}


def test_our_stores_and_queries_pass() -> None:
    found = list(writes.check("cpu", RUNS))
    assert [str(v) for v in found if v.answer != "agrees"] == []
    assert {v.stage for v in found} == {"index_k", "index_q"}


@pytest.mark.gpu
def test_our_stores_and_queries_pass_on_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here: the compiled kernels are not run")
    found = list(writes.check("cuda"))
    assert [str(v) for v in found if v.answer != "agrees"] == []
    assert "graph replay equals eager" in {v.rule for v in found}


def test_faults_of_a_store_are_found() -> None:
    runs = []

    def unsteady(*arguments: Tensor) -> None:
        store.store(*arguments)  # type: ignore[arg-type]
        runs.append(0)
        if len(runs) == 3:
            arguments[-1][0, 0] ^= 1

    def spilling(*arguments: Tensor) -> None:
        store.store(*arguments)  # type: ignore[arg-type]
        arguments[-1][1, -1] = 7

    def scaled(pooled: Tensor, weight: Tensor, eps: float, *arguments: Tensor) -> None:
        store.store(pooled, weight * (1 + len(pooled) / 50), eps, *arguments)

    assert set(store_faults(unsteady)) == {"4 runs bitwise equal"}
    assert set(store_faults(scaled)) == {"batch invariance"}
    assert store_faults(spilling) == {"guards untouched": "1 bytes outside the slots were written"}


def test_faults_of_a_query_are_found() -> None:
    def batched(rows: Tensor, weight: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor | None]:
        out, scaled = query.prepare_query(rows, weight, *rest)
        assert scaled is not None
        return out, scaled + len(rows)

    found = {v.rule: v.answer for v in check_query("planted", batched, operands("cpu"), "cpu", RUNS)}
    assert found == {"4 runs bitwise equal": "agrees", "batch invariance": "bug"}


class Unsteady:
    """A path of one stage whose runs differ: in the order of a selection, or in the entries themselves."""

    name = "unsteady"

    def __init__(self, first: list[int], later: list[int]) -> None:
        self.values = [first, *([later] * 30)]

    def availability(self) -> SimpleNamespace:
        return SimpleNamespace(ok=True)

    def stage(self, *_: object) -> dict[str, Tensor]:
        return {"value": torch.tensor([self.values.pop(0)], dtype=torch.int32)}

    def run(self, *_: object) -> Trace:
        return Trace("case", 2, self.name, {"topk": self.stage()})


@pytest.mark.parametrize(
    ("later", "answer", "said"),
    [
        ([4, 7, -1], "agrees", ""),
        ([7, 4, -1], "agrees", "(the same entries in another order: blocks append them as they finish)"),
        ([7, 5, -1], "bug", "topk.value, run 1 and the first: 2 of 3 elements differ, the first at [0, 0]: 7 and 4"),
    ],
)
def test_a_path_is_run_again(monkeypatch: pytest.MonkeyPatch, later: list[int], answer: str, said: str) -> None:
    monkeypatch.setattr(paths, "get_path", lambda spec: Unsteady([4, 7, -1], later))
    monkeypatch.setattr(paths, "stages_of", lambda kind: ["topk"])
    monkeypatch.setattr(
        paths, "generate", lambda case, layer: SimpleNamespace(to=lambda d: SimpleNamespace(kind="csa"))
    )
    (found,) = paths.check("unsteady", "cpu", repeats=3)
    assert found.answer == answer and said in found.text


def test_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    from difftest.robust import reads

    monkeypatch.setattr(reads, "reads", lambda: [])
    monkeypatch.setattr(writes, "modules", lambda device: {})
    monkeypatch.setattr(paths, "check", lambda spec, device: [verdict(spec, "score", "rule", "differs")])
    assert CliRunner().invoke(app, ["robust", "--device", "cpu"]).exit_code == 0
    run = CliRunner().invoke(app, ["robust", "--device", "cpu", "--path", "bf16-k", "--json"])
    assert run.exit_code == 1
    assert [(row["path"], row["headline"]) for row in json.loads(run.stdout)] == [("bf16-k", "bug at score")]
    assert CliRunner().invoke(app, ["robust", "--device", "tpu"]).exit_code == 2
    assert CliRunner().invoke(app, ["robust", "--device", "cpu", "--path", "nothing"]).exit_code == 2
