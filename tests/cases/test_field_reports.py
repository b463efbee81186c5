"""Each field report: the reference keeps its contract, and its seeded fault breaks the rule it must break."""

import pytest
import torch
from difftest.cases.field_report import COMPONENTS, Fault, FieldReport
from difftest.cases.field_reports import FIELD_REPORTS
from difftest.cases.reports_topk import selection_violations
from difftest.reference.indexer import select

from difftest.stages import STAGES

FAULTS = [(report, fault) for report in FIELD_REPORTS.values() for fault in report.faults]
CODES = ["T1", "T2", "T3", "T6", "L7", "L6", "L3", "L8", "L1", "N1", "N2", "N3", "C2", "C5", "C4", "S1", "S4", "A2+A3"]


def test_the_list_is_complete() -> None:
    assert sorted(report.code for report in FIELD_REPORTS.values()) == sorted(CODES)
    for report in FIELD_REPORTS.values():
        assert report.stage in STAGES and report.kind in COMPONENTS
        assert report.urls and report.faults
        assert report.id.startswith(report.code.lower().replace("+", "-"))


@pytest.mark.parametrize("report", FIELD_REPORTS.values(), ids=lambda report: report.id)
def test_the_reference_keeps_the_contract(report: FieldReport) -> None:
    assert report.check(report.reference) == []


@pytest.mark.parametrize("report, fault", FAULTS, ids=lambda part: getattr(part, "id", getattr(part, "name", "")))
def test_a_seeded_fault_breaks_its_rule(report: FieldReport, fault: Fault) -> None:
    violations = report.check(fault.component)
    assert fault.rule in {violation.rule for violation in violations}
    assert all(violation.message for violation in violations)


@pytest.mark.parametrize("report, fault", FAULTS, ids=lambda part: getattr(part, "id", getattr(part, "name", "")))
def test_opt_in_rules_are_broken_only_by_policy_faults(report: FieldReport, fault: Fault) -> None:
    broken = {violation.rule for violation in report.check(fault.component)}
    strict = broken - set(report.opt_in)
    assert bool(strict) == (fault.rule not in report.opt_in)


PICKS = {
    "shape": [[0, 1]],
    "range": [[0, 1, 9]],
    "unique": [[0, 1, 1]],
    "padding": [[0, -1, 1]],
    "count": [[0, 1, -1]],
    "nan": [[0, 1, 3]],
    "values": [[0, 1, 4]],
}


@pytest.mark.parametrize("rule", PICKS)
def test_every_rule_of_a_selection_can_fail(rule: str) -> None:
    score = torch.tensor([[5.0, 4.0, 3.0, torch.nan, 2.0, 1.0, 99.0]])
    visible = torch.tensor([6])
    assert selection_violations(score, visible, 3, select(score, visible, 3)) == []
    broken = {violation.rule for violation in selection_violations(score, visible, 3, torch.tensor(PICKS[rule]))}
    assert rule in broken


def test_ties_at_the_cut_are_free() -> None:
    score, visible = torch.tensor([[2.0, 1.0, 1.0, 1.0]]), torch.tensor([4])
    for other in (1, 2, 3):
        assert selection_violations(score, visible, 2, torch.tensor([[other, 0]])) == []
