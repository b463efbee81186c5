"""On the real paths: clean seeds raise no alarm; a sign, an offset or a rounding in a stage is answered by its name."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from difftest.paths.base import Path, get_path
from difftest.policy import load_policy
from difftest.runner import run_layer
from difftest.stages import STAGES, StageName
from difftest.trace import StageTensors
from difftest.verdict import first_divergence, judge

from .small import LAYER, small_case, small_inputs

POLICY = load_policy("default")
SEEDS_A_TEST = 25
TESTED = ("bf16-k", "sglang-fp8-model")


def sign(value: Tensor) -> Tensor:
    """One channel's sign, in every row."""
    value[..., -1] = -value[..., -1]
    return value


def offset(value: Tensor) -> Tensor:
    """Every row one place off, along its own axis."""
    return value.roll(1, -1)


def rounding(value: Tensor) -> Tensor:
    """Six significand bits: e3m5 where bf16 has seven and fp8 values have their scale's 23."""
    mantissa, exponent = value.frexp()
    return torch.ldexp((mantissa * 2**6).round() / 2**6, exponent)


FAULTS: dict[str, Callable[[Tensor], Tensor]] = {"sign": sign, "offset": offset, "rounding": rounding}


class Faulty:
    """`path` with one tensor of one stage changed after it was computed; the later stages read the changed one."""

    def __init__(self, path: Path, stage: StageName, fault: Callable[[Tensor], Tensor]) -> None:
        self.path, self.at, self.fault = path, stage, fault
        self.name, self.declares = path.name, path.declares

    def stage(self, stage: StageName, inputs: object, trace: object) -> StageTensors:
        made = dict(self.path.stage(stage, inputs, trace))  # type: ignore[arg-type]
        if stage == self.at:
            first = next(iter(STAGES[stage].tensors))
            made = {first: self.fault(made[first].clone()), **{k: v for k, v in made.items() if k != first}}
        return made


@pytest.mark.parametrize("batch", range(8))
def test_200_clean_seeds_raise_no_alarm(batch: int) -> None:
    """Lengths, rows and steps vary with the seed; formats may cost recall, so `explained` is no alarm."""
    torch.set_num_threads(1)
    paths = [get_path(name) for name in ("deepseek", "sglang-fp4-model", *TESTED)]
    for seed in range(SEEDS_A_TEST * batch, SEEDS_A_TEST * (batch + 1)):
        lengths = (70 + seed % 97, 65 + seed % 13)
        case = small_case(seed, lengths=lengths, mode=("prefill", "decode")[seed % 2], decode_tokens=2, rows=4)
        for result in run_layer(case, LAYER, paths):
            (verdict,) = judge(result.records, POLICY)
            assert verdict.answer in ("agrees", "explained"), (seed, str(verdict))


def divergence(path: Path | Faulty) -> tuple[str | None, str]:
    (result,) = run_layer(small_case(3), LAYER, [path])  # type: ignore[list-item]
    found = first_divergence(judge(result.records, POLICY))
    return (found.stage if found else None), str(found)


@pytest.mark.parametrize("name", TESTED)
@pytest.mark.parametrize("stage", [stage for stage in STAGES if stage != "topk"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_answered_with_its_stage(name: str, stage: StageName, fault: str) -> None:
    torch.set_num_threads(1)
    assert divergence(Faulty(get_path(name), stage, FAULTS[fault]))[0] == stage


def drop_best(picks: Tensor) -> Tensor:
    """The best entry's place taken by the next entry that was not selected."""
    for row in picks:
        chosen = set(row.tolist())
        row[0] = next((entry for entry in range(50) if entry not in chosen), -1)
    return picks


def one_past(picks: Tensor) -> Tensor:
    return torch.where(picks < 0, -1, picks + 1)


@pytest.mark.parametrize("name", TESTED)
@pytest.mark.parametrize("fault", [drop_best, one_past], ids=lambda fault: str(fault.__name__))
def test_a_wrong_selection_is_answered_with_topk(name: str, fault: Callable[[Tensor], Tensor]) -> None:
    torch.set_num_threads(1)
    assert divergence(Faulty(get_path(name), "topk", fault))[0] == "topk"


@pytest.mark.parametrize("name", TESTED)
def test_without_a_fault_there_is_no_divergence(name: str) -> None:
    assert divergence(get_path(name))[0] is None
    assert small_inputs(3).visible.max() > 16
