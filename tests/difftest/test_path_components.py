"""Field reports on whole paths: the oracle keeps every contract, the others break only what is known, faults show."""

import pytest
import torch
from difftest.cases.field_reports import FIELD_REPORTS
from difftest.reference.indexer import select
from difftest.reference.inputs import LayerInputs

from difftest.path_components import PathComponents
from difftest.paths.base import get_path
from difftest.paths.oracle import Oracle
from difftest.reports import KNOWN, check_reports
from difftest.trace import StageTensors, Trace

PATHS = ("oracle", *KNOWN)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("report", FIELD_REPORTS)
@pytest.mark.parametrize("name", PATHS)
def test_paths_keep_the_contracts(name: str, report: str) -> None:
    violations = PathComponents(get_path(name)).check(FIELD_REPORTS[report])
    if violations is None:
        assert FIELD_REPORTS[report].kind in (
            "rotate",
            "store_and_read",
            "page_offset",
            "verify_and_roll_back",
            "attention",
        )
    elif report not in KNOWN.get(name, {}):
        assert violations == []


def test_deepseeks_known_deviation_is_seen() -> None:
    violations = PathComponents(get_path("deepseek")).check(FIELD_REPORTS["t6-nan-scores"])
    assert violations and {violation.rule for violation in violations} >= {"nan"}


class ScansPaddedRow(Oracle):
    """An oracle whose top-k reads the whole score row."""

    def topk(self, inputs: LayerInputs, trace: Trace) -> StageTensors:
        score = trace.value("score")
        whole = torch.full_like(inputs.visible, score.shape[1])
        return {"value": select(score, whole, inputs.config.index_topk)}


def test_a_fault_in_a_path_is_found_through_its_stage() -> None:
    violations = PathComponents(ScansPaddedRow()).check(FIELD_REPORTS["l3-past-row-end"])
    assert violations and {violation.rule for violation in violations} >= {"range"}


class OtherTies(Oracle):
    """An oracle whose top-k gives ties to the highest entry."""

    def topk(self, inputs: LayerInputs, trace: Trace) -> StageTensors:
        score = trace.value("score")
        chosen = select(score.flip(1), inputs.visible, inputs.config.index_topk)
        return {"value": torch.where(chosen < 0, chosen, score.shape[1] - 1 - chosen)}


def test_policies_count_only_when_asked_for() -> None:
    components = PathComponents(OtherTies())
    report = FIELD_REPORTS["t3-ties"]
    assert components.check(report) == []
    asked = components.check(report, policies=["lowest entry wins"])
    assert asked and {violation.rule for violation in asked} == {"lowest entry wins"}


def test_rows_say_kept_known_broken_or_out_of_reach() -> None:
    rows = check_reports(["l3-past-row-end", "t6-nan-scores", "s4-page-offset"], ["bf16-k"])
    assert [row["answer"] for row in rows] == ["kept", "known", "out of reach"]


def test_an_unknown_report_gets_the_nearest_names() -> None:
    with pytest.raises(ValueError, match="l3-past-row-end"):
        check_reports(["l3-past-row-ends"], ["bf16-k"])
