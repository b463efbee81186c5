"""The memory limit of a path: running out is its result, and the run goes on."""

from dataclasses import replace

import pytest
import torch
from difftest.cases.registry import all_cases
from difftest.reference.inputs import LayerInputs

from difftest import runner
from difftest.memory import limited, peak_bytes
from difftest.paths.base import Path
from difftest.paths.oracle import Oracle
from difftest.runner import run_layer
from difftest.session import find_case
from difftest.trace import StageTensors, Trace

SMALL = replace(find_case("swa-1029"), lengths=(40,), rows=4)


class Greedy(Path):
    """The oracle's keys and values, and no memory left for attention."""

    name = "greedy"
    says = "runs out of memory"
    declares = Oracle.declares

    def kv(self, inputs: LayerInputs, trace: Trace) -> StageTensors:
        return Oracle().stage("kv", inputs, trace)

    def attention(self, inputs: LayerInputs, trace: Trace) -> StageTensors:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 34.00 GiB.\nmore")


def test_running_out_of_memory_is_a_result_and_the_next_path_runs() -> None:
    first, second = run_layer(SMALL, 0, [Greedy(), Oracle()])
    stages = {record.stage: record for record in first.records if record.comparison == "isolated"}
    assert stages["attention"].skipped == "out of memory: CUDA out of memory. Tried to allocate 34.00 GiB."
    assert stages["kv"].facts["peak_bytes"] >= 0
    assert set(second.trace.stages) == {"kv", "attention"}


def test_the_share_of_the_case_reaches_the_stages_of_paths_and_not_the_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def watched(device: torch.device, share: float):  # type: ignore[no-untyped-def]
        seen.append(share)
        return limited(device, share)

    monkeypatch.setattr(runner, "limited", watched)
    list(run_layer(replace(SMALL, memory_share=0.3), 0, [Greedy()]))
    assert seen == [1.0, 1.0, 0.3, 0.3]


def test_the_profile_gpu_reaches_a_million_tokens_and_the_length_that_ran_out() -> None:
    lengths = {max(case.lengths) for case in all_cases().values() if "gpu" in case.profiles}
    assert {22597, 1_048_576} <= lengths


@pytest.mark.gpu
def test_the_limit_stops_torch_and_is_lifted_again() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here: nothing is limited")
    device = torch.device("cuda", 0)
    size = torch.cuda.get_device_properties(device).total_memory // 50
    with limited(device, 0.01), pytest.raises(torch.OutOfMemoryError):
        torch.empty(size, dtype=torch.uint8, device=device)
    before = peak_bytes(device, reset=True)
    kept = torch.empty(size, dtype=torch.uint8, device=device)
    assert peak_bytes(device) - before >= size
    del kept
