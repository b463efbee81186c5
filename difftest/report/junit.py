"""JUnit XML from records: one test case a stage of a path on a layer of a case, with its numbers as properties."""

import xml.etree.ElementTree as ElementTree

from ..record import Record
from ..verdict import failure
from .evidence import Evidence
from .properties import properties


def junit(evidence: Evidence) -> str:
    """One suite a path. Properties: case, stage, layer, path, the decisive metric and its bound, then every metric."""
    root = ElementTree.Element("testsuites", name="difftest")
    for path in dict.fromkeys(record.path for record in evidence.records):
        mine = [record for record in evidence.records if record.path == path and record.comparison == "isolated"]
        later = {
            (record.case, record.layer, record.stage): record
            for record in evidence.records
            if record.path == path and record.comparison == "accumulated"
        }
        suite = ElementTree.SubElement(root, "testsuite", name=path)
        for record in mine:
            _case(suite, record, later.get((record.case, record.layer, record.stage)), evidence)
        for name, kind in (("tests", "testcase"), ("failures", "testcase/failure"), ("skipped", "testcase/skipped")):
            suite.set(name, str(len(suite.findall(kind))))
    if evidence.problems:
        suite = ElementTree.SubElement(root, "testsuite", name="completeness", tests=str(len(evidence.problems)))
        suite.set("errors", str(len(evidence.problems)))
        for problem in evidence.problems:
            case = ElementTree.SubElement(suite, "testcase", name=problem, classname="difftest.completeness")
            ElementTree.SubElement(case, "error", message=problem)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _case(suite: ElementTree.Element, record: Record, later: Record | None, evidence: Evidence) -> None:
    name = f"{record.case}-layer{record.layer}-{record.stage}"
    case = ElementTree.SubElement(suite, "testcase", name=name, classname=f"difftest.{record.path}")
    seconds = record.facts.get("seconds", 0.0)
    case.set("time", f"{seconds if isinstance(seconds, int | float) else sum(seconds):.6f}")
    stored = ElementTree.SubElement(case, "properties")
    identity = {
        "case": record.case,
        "layer": record.layer,
        "kind": record.kind,
        "path": record.path,
        "stage": record.stage,
    }
    pairs = [
        *((key, str(value)) for key, value in identity.items()),
        *properties([record, *([later] if later else [])]),
    ]
    for key, value in pairs:
        ElementTree.SubElement(stored, "property", name=key, value=value)
    failed = failure(record, evidence.policy)
    if failed:
        ElementTree.SubElement(case, "failure", message=failed.why, type=failed.rule)
    elif record.skipped:
        ElementTree.SubElement(case, "skipped", message=record.skipped)
