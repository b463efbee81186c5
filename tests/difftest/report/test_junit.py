import xml.etree.ElementTree as ElementTree

from difftest.report.evidence import load
from difftest.report.junit import junit

from .conftest import isolated, records


def read(folder, policy="default"):
    return ElementTree.fromstring(junit(load([folder], policy)))


def test_properties_carry_stage_layer_path_metric_and_bound(run_dir):
    root = read(run_dir())
    suites = {suite.get("name"): suite for suite in root}
    assert {name: suite.get("tests") for name, suite in suites.items()} == {"oracle": "32", "bf16-k": "32"}
    case = next(one for one in suites["bf16-k"] if one.get("name") == "needle-5294-layer2-topk")
    found = {one.get("name"): one.get("value") for one in case.find("properties")}
    want = {"case": "needle-5294", "layer": "2", "kind": "csa", "path": "bf16-k", "stage": "topk"}
    assert want.items() <= found.items()
    assert (found["metric"], found["bound"]) == ("excess 0.25", "1")
    assert (found["isolated.excess"], found["isolated.excess.bound"]) == ("0.25", "1")
    assert found["accumulated.recall"] == "0.99"
    assert case.get("time") == "0.001000"


def test_failures_and_skips(run_dir):
    made = [*records(bug=True), isolated("gaussian-2117", 42, "bf16-k", "score", skipped="NaN in index_query[3]")]
    root = read(run_dir(found=made))
    suite = next(one for one in root if one.get("name") == "bf16-k")
    assert (suite.get("failures"), suite.get("skipped")) == ("2", "1")
    failed = {case.get("name"): case.find("failure") for case in suite if case.find("failure") is not None}
    assert failed["gaussian-2117-layer2-index_k"].get("type") == "excess"
    assert "1234" in failed["gaussian-2117-layer2-index_k"].get("message")
    assert failed["needle-5294-layer14-topk"].get("type") == "range"


def test_another_policy_judges_anew(run_dir):
    folder = run_dir(found=[isolated("gaussian-2117", 2, "bf16-k", "kv", excess=5.0)])
    assert read(folder)[0].get("failures") == "1"
    assert read(folder, "exploratory")[0].get("failures") == "0"


def test_what_is_incomplete_is_an_error(run_dir):
    from difftest.run_dir import RunDir

    folder = run_dir()
    RunDir.open(folder).write_manifest(problems=["shard 2 of 4 is missing"])
    suite = next(one for one in read(folder) if one.get("name") == "completeness")
    assert suite[0].find("error").get("message") == "shard 2 of 4 is missing"
