import json

import pytest

from difftest.record import read_records

TINY = ("--difftest-case", "tiny-9")


def manifest(folder):
    return json.loads((folder / "run.json").read_text())


def test_a_run_leaves_records_a_plan_and_a_summary(suite, pytester):
    result = suite(*TINY, "--difftest-out", "out")
    result.assert_outcomes(passed=4)
    result.stdout.fnmatch_lines(["*difftest*", "oracle *2 agrees", "records: out"])
    facts = manifest(pytester.path / "out")
    assert facts["status"] == "complete" and facts["not_run"] == 0
    assert facts["cases"]["tiny-9"]["lengths"] == [9]
    assert [verdict["answer"] for verdict in facts["verdicts"]] == ["agrees", "agrees"]
    assert len(list(read_records(pytester.path / "out/records.jsonl"))) == 8
    assert not list((pytester.path / "out").glob("*-main.jsonl")), "workers' files are joined"


def test_ids_are_case_layer_path_stage(suite):
    result = suite(*TINY, "--collect-only", "-q")
    result.stdout.fnmatch_lines(["*test_stage[[]tiny-9-layer0-oracle-kv[]]"])


def test_layer_seed_policy_and_path(suite, pytester):
    result = suite(
        *TINY, "--difftest-layer", "1", "--difftest-seed", "7", "--difftest-policy", "strict", "--difftest-out", "out"
    )
    result.assert_outcomes(passed=2)
    facts = manifest(pytester.path / "out")
    assert (facts["layers"], facts["policy"], facts["paths"]) == ([1], "strict", ["oracle"])
    assert facts["cases"]["tiny-9"]["base_seed"] == 7


@pytest.mark.parametrize(
    ("option", "says"),
    [
        (("--difftest-case", "tiny-8"), "did you mean tiny-9"),
        (("--difftest-profile", "smok"), "profiles are smoke"),
        (("--difftest-path", "orcale", *TINY), "did you mean oracle"),
        (("--difftest-layer", "2", *TINY), "layer 2 is csa"),
        (("--difftest-budget", "soon", *TINY), "budget 'soon' is no time span"),
    ],
)
def test_unknown_names_are_one_sentence(suite, option, says):
    result = suite(*option)
    assert result.ret in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.INTERRUPTED)
    assert "Traceback" not in result.stdout.str()
    assert says in result.stdout.str() + result.stderr.str()


def test_an_old_result_is_never_overwritten(suite, pytester):
    pytester.mkdir("out").joinpath("run.json").write_text("{}")
    result = suite(*TINY, "--difftest-out", "out")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*out is not empty*"])


def test_a_session_that_judges_nothing_is_not_green(suite):
    result = suite(*TINY, "--difftest-path", "sglang-fp8", "-k", "sglang_fp8")
    assert result.parseoutcomes() == {"skipped": 4, "deselected": 4}
    assert result.ret == 125


def test_a_profile_chooses_the_cases(suite):
    result = suite("--difftest-profile", "smoke", "--collect-only", "-q")
    assert {line.split("[")[1].rsplit("-", 2)[0] for line in result.outlines if "test_stage[" in line} == {
        "tiny-9-layer0",
        "tiny-9-layer1",
        "tiny-300-layer3",
    }
    none = suite("--difftest-profile", "gpu", "--collect-only", "-q")
    assert not [line for line in none.outlines if "test_stage[tiny" in line]


class StopAfter:
    """Ends the session after the test whose id ends so."""

    def __init__(self, end):
        self.end = end

    def pytest_sessionstart(self, session):
        self.session = session

    def pytest_runtest_logfinish(self, nodeid):
        if nodeid.endswith(self.end):
            self.session.shouldstop = "enough"


def test_what_was_planned_and_never_ran_is_recorded(suite, pytester):
    result = suite(*TINY, "--difftest-out", "out", plugins=[StopAfter("layer0-oracle-attention]")])
    assert result.ret == pytest.ExitCode.INTERRUPTED
    facts = manifest(pytester.path / "out")
    assert (facts["status"], facts["not_run"]) == ("interrupted", 2)
    assert [verdict["answer"] for verdict in facts["verdicts"]] == ["agrees", "cannot judge"]
    lost = [record for record in read_records(pytester.path / "out/records.jsonl") if record.skipped]
    assert [(record.layer, record.stage, record.skipped) for record in lost] == [
        (1, "kv", "not run: the run ended before it"),
        (1, "attention", "not run: the run ended before it"),
    ]


def test_junit_properties_carry_stage_layer_path_metric_and_bound(suite, pytester):
    import xml.etree.ElementTree as ElementTree

    suite(*TINY, "--junitxml", "junit.xml", "-o", "junit_family=xunit1")
    cases = ElementTree.parse(pytester.path / "junit.xml").findall(".//testcase")
    first = {one.get("name"): one.get("value") for one in cases[0].findall(".//property")}
    assert (first["case"], first["layer"], first["path"], first["stage"]) == ("tiny-9", "0", "oracle", "kv")
    metric, value = first["metric"].split()
    assert float(value) <= float(first["bound"]) == float(first[f"isolated.{metric}.bound"])


def durations(**units):
    """A file of recorded durations as pytest-split writes it, one test a unit (underscores for dashes)."""
    return json.dumps({f"x.py::test_stage[{name.replace('_', '-')}-oracle-kv]": spent for name, spent in units.items()})


def test_a_budget_orders_by_catch_for_cost_and_lists_the_rest(suite, pytester):
    pytester.path.joinpath(".test_durations").write_text(
        durations(tiny_9_layer0=2, tiny_9_layer1=4, tiny_300_layer3=50)
    )
    pytester.path.joinpath("kills.json").write_text(
        json.dumps({"rows": [{"mutant": "no-sink", "path": "oracle", "case": "tiny-300", "killed_by": ["excess"]}]})
    )
    options = (*TINY, "--difftest-case", "tiny-300", "--difftest-kill-matrix", "kills.json")
    result = suite(*options, "--difftest-budget", "53s", "--collect-only", "-q")
    ids = [line.split("[")[1] for line in result.outlines if "test_stage[" in line]
    assert [name.rsplit("-", 2)[0] for name in ids[::2]][:2] == ["tiny-300-layer3", "tiny-9-layer0"]


def test_what_the_budget_leaves_out_is_in_summary_and_run(suite, pytester):
    pytester.path.joinpath(".test_durations").write_text(durations(tiny_9_layer0=2, tiny_9_layer1=4))
    result = suite(*TINY, "--difftest-budget", "3s", "--difftest-out", "out")
    result.assert_outcomes(passed=2, deselected=2)
    result.stdout.fnmatch_lines(["left out for the budget*2 s:", "*tiny-9-layer1 (4.0 s)"])
    assert manifest(pytester.path / "out")["left_out"] == [{"name": "tiny-9-layer1", "seconds": 4.0, "lost": []}]


def test_a_budget_spent_early_leaves_out_what_has_not_begun(suite, pytester):
    pytester.path.joinpath(".test_durations").write_text(durations(tiny_9_layer0=1e-4, tiny_9_layer1=1e-4))
    result = suite(*TINY, "--difftest-budget", "0.001s", "--difftest-out", "out")
    result.assert_outcomes(passed=2, skipped=2)
    facts = manifest(pytester.path / "out")
    assert [unit["name"] for unit in facts["left_out"]] == ["tiny-9-layer1"]
    assert facts["not_run"] == 0
