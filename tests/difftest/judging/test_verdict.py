"""From records to verdicts: which answer, which stage, what it says, and what a policy changes."""

import json
import math
from dataclasses import replace

import pytest

from difftest.policy import SHIPPED, load_policy, parse_policy
from difftest.record import Finding, Record, Worst, append_records, read_records
from difftest.stages import STAGES
from difftest.text import apart
from difftest.verdict import explain_failure, failing, first_failure, judge, overall

DEFAULT = load_policy("default")
FORMATS = {"index_k": "e4m3", "index_q": "e4m3", "kv": "e4m3_pow2"}


def record(stage: str, comparison: str = "isolated", layer: int = 2, path: str = "p", **rest: object) -> Record:
    if comparison == "isolated":
        rest.setdefault("metrics", {"excess": 0.1, "deviation": 0.0})
        rest.setdefault("bounds", {"excess": 1.0, "deviation": 1.0})
        rest.setdefault("facts", {"format": FORMATS.get(stage, "fp32")})
    against = "exact stage" if comparison == "isolated" else "oracle"
    return Record("case", layer, "csa", path, stage, comparison, against, **rest)  # type: ignore[arg-type]


def clean(**fields: object) -> list[Record]:
    return [record(stage, **fields) for stage in STAGES]


def quality(recall: float = 1.0) -> list[Record]:
    shares = {"format_index_k": 0.007, "format_index_q": 0.008, "format_head_weight": 1e-6, "arithmetic_error": 1e-7}
    return [
        record("score", "accumulated", metrics={"error": 0.01, **shares}),
        record("topk", "accumulated", metrics={"value_recall": recall, "lost_mass_mean": 0.001}),
        record(
            "attention", "accumulated", metrics={"relative_error": 0.05, "selection_error": 0.01, "format_error": 0.04}
        ),
    ]


def failed(stage: str, excess: float = 5.0, layer: int = 2, path: str = "p") -> Record:
    worst = Worst({"row": 3, "entry": 70}, 1.00000012, 1.0, 1e-8)
    metrics, bounds = {"excess": excess, "deviation": 0.5}, {"excess": 1.0, "deviation": 0.1}
    return record(stage, layer=layer, path=path, metrics=metrics, bounds=bounds, worst=worst)


def test_agrees():
    (verdict,) = judge(clean() + quality(), DEFAULT)
    assert (verdict.answer, verdict.stage, verdict.exit_code, verdict.text) == ("agrees", None, 0, "agrees")


def test_first_failure_in_stage_order_is_the_bug_whatever_the_order_of_records():
    records = [failed("score"), failed("index_q"), *clean()[3:]]
    for given in (records, records[::-1]):
        (verdict,) = judge(given, DEFAULT)
        assert (verdict.answer, verdict.stage, verdict.exit_code) == ("bug", "index_q", 1)


def test_bug_says_worst_element_both_values_bound_and_what_would_have_passed():
    (verdict,) = judge([failed("score", 12.0)], DEFAULT)
    assert verdict.needed == 12
    assert verdict.worst == Worst({"row": 3, "entry": 70}, 1.00000012, 1.0, 1e-8)
    for part in ("bug at score", "row 3, entry 70", "got 1.0000001", "exact 1", "bound 1e-08", "1.2e-07", "12 times"):
        assert part in verdict.text


def test_values_print_with_enough_digits_to_differ():
    assert apart(1.00000012, 1.0) == ("1.0000001", "1")
    assert apart(0.5, 0.25) == ("0.5", "0.25")
    assert apart(0.1, 0.1) == ("0.1", "0.1")
    (verdict,) = judge([record("score", metrics={"rms": 1.0000004e-3}, bounds={"rms": 1e-3})], DEFAULT)
    assert "rms 0.0010000004 exceeds its bound 0.001" in verdict.text


def test_finding_fails_at_any_excess():
    (verdict,) = judge([record("topk", findings=[Finding("order", "row 1 leaves out entry 5")])], DEFAULT)
    assert (verdict.answer, verdict.rule, verdict.needed) == ("bug", "order", math.inf)
    assert json.loads(json.dumps(verdict.to_json()))["needed"] == "inf"


@pytest.mark.parametrize("metric", ["excess", "rms", "row_rms", "gain", "gain_all"])
def test_every_bounded_metric_of_the_policy_is_a_gate(metric):
    measured = record("attention", metrics={metric: 1.01}, bounds={metric: 1.0})
    assert failing(measured, DEFAULT)
    assert not failing(replace(measured, metrics={metric: 1.0}), DEFAULT)
    assert not failing(replace(measured, bounds={}), DEFAULT)
    assert failing(replace(measured, metrics={metric: math.nan}), DEFAULT)


def test_explained_names_the_stage_with_the_largest_share_and_its_format():
    (verdict,) = judge(clean() + quality(recall=0.97), DEFAULT)
    assert (verdict.answer, verdict.stage, verdict.format, verdict.exit_code) == ("explained", "index_q", "e4m3", 0)
    assert verdict.headline == "explained by format e4m3 at index_q"
    assert "value_recall 0.97 is below the budget 0.99" in verdict.why
    assert "index_q 0.008, index_k 0.007" in verdict.why
    (verdict,) = judge(clean() + quality(recall=0.97), load_policy("strict"))
    assert verdict.exit_code == 1
    assert judge(clean() + quality(recall=0.97), load_policy("exploratory"))[0].answer == "agrees"


def test_attention_budget_points_at_selection_or_latents():
    records = clean() + quality()
    worse = {"relative_error": 0.5, "selection_error": 0.1, "format_error": 0.4}
    records[-1] = record("attention", "accumulated", metrics=worse)
    assert judge(records, DEFAULT)[0].headline == "explained by format e4m3_pow2 at kv"
    records[-1] = record("attention", "accumulated", metrics={**worse, "selection_error": 0.45})
    assert judge(records, DEFAULT)[0].headline == "explained by format e4m3 at index_q"


def test_isolated_failure_outranks_quality():
    records = [*clean(), *quality(recall=0.5)]
    records[1] = failed("index_k")
    assert judge(records, DEFAULT)[0].headline == "bug at index_k"


def test_budgets_apply_to_the_oracle_only():
    records = clean() + [replace(measured, against="deepseek") for measured in quality(recall=0.5)]
    assert judge(records, DEFAULT)[0].answer == "agrees"


def test_unexplained_swap_is_a_bug_though_every_stage_passed():
    records = clean() + quality()
    records[-2] = replace(records[-2], findings=[Finding("unexplained_swap", "row 3 selects entry 9")])
    (verdict,) = judge(records, DEFAULT)
    assert (verdict.answer, verdict.stage, verdict.rule) == ("bug", "topk", "unexplained_swap")
    (verdict,) = judge(records, load_policy("exploratory"))
    assert (verdict.answer, verdict.notes) == ("agrees", ("row 3 selects entry 9",))


def test_cannot_judge_names_stage_and_reason():
    records = clean()
    records[2] = record("index_q", skipped="nan in index_query[3, 0, 7]")
    (verdict,) = judge(records, DEFAULT)
    assert (verdict.answer, verdict.exit_code) == ("cannot judge", 125)
    assert "index_q: nan in index_query[3, 0, 7]" in verdict.text
    records[1] = failed("index_k")
    assert judge(records, DEFAULT)[0].answer == "bug"


def test_unexercised_selection_is_said_and_never_counted_as_checked():
    records = clean()
    why = {"why": "the longest row has 75 visible entries and k is 512"}
    records[5] = record("topk", skipped="selection not exercised", facts=why)
    (verdict,) = judge(records, DEFAULT)
    assert (verdict.answer, verdict.exit_code) == ("agrees", 0)
    assert "selection not exercised: the longest row has 75" in verdict.text
    (verdict,) = judge(records, load_policy("strict"))
    assert (verdict.answer, verdict.exit_code) == ("cannot judge", 125)
    assert "every other stage agrees" in verdict.text


def test_one_verdict_a_case_layer_and_path_and_a_summary_a_path():
    records = [*clean(layer=14), failed("kv", layer=14), *clean(layer=2), *clean(layer=2, path="q")]
    records = [r for r in records if not (r.layer == 14 and r.stage == "kv" and r.metrics["excess"] < 1)]
    records += [failed("score", layer=42), failed("index_k", layer=42, path="q")]
    verdicts = judge(records, DEFAULT)
    assert [(v.layer, v.path, v.answer) for v in verdicts] == [
        (14, "p", "bug"),
        (2, "p", "agrees"),
        (2, "q", "agrees"),
        (42, "p", "bug"),
        (42, "q", "bug"),
    ]
    p, q = overall(verdicts)
    assert (p.path, p.answer, p.first.layer, p.first.stage, p.counts) == ("p", "bug", 14, "kv", {"agrees": 1, "bug": 2})
    assert (q.path, q.first.stage) == ("q", "index_k")
    assert first_failure(records, DEFAULT).layer == 14


def test_records_alone_are_enough_to_judge_again(tmp_path):
    records = [*clean(), *quality(recall=0.97), failed("kv", layer=3), failed("kv", math.inf, layer=4)]
    append_records(tmp_path / "records.jsonl", records)
    again = list(read_records(tmp_path / "records.jsonl"))
    for name in SHIPPED:
        assert judge(again, load_policy(name)) == judge(records, load_policy(name))


def test_a_lenient_policy_lets_a_small_excess_pass():
    assert judge([failed("score", 5.0)], load_policy("exploratory"))[0].answer == "agrees"
    assert judge([failed("score", 50.0)], load_policy("exploratory"))[0].answer == "bug"


def test_explanation_shows_what_was_verified_before():
    records = clean()
    records[4] = failed("score")
    (verdict,) = judge(records, DEFAULT)
    lines = explain_failure(verdict, records).splitlines()
    assert lines[0].startswith("case layer 2 p: bug at score: row 3, entry 70: got 1.0000001, exact 1")
    assert [line.split()[0] for line in lines[1:9]] == list(STAGES)
    assert "excess 5 / 1" in lines[5]
    assert lines[-1].endswith("difftest run --case case --layer 2 --path p")


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        ({"name": "x"}, "isolated is missing"),
        ({"name": "x", "isolated": {}, "colour": 1}, "unknown key colour"),
        ({"name": "x", "isolated": {"excess": 0}}, "must be positive"),
        ({"name": "x", "isolated": {}, "unexercised": "pass"}, "choose cannot judge or agrees"),
        ({"name": "x", "isolated": {}, "format_fails": "yes"}, "write true or false"),
        ({"name": "x", "isolated": {}, "budget": [{"stage": "topk", "metric": "recall"}]}, "neither min nor max"),
        (
            {"name": "x", "isolated": {}, "budget": [{"stage": "top", "metric": "recall", "min": 1}]},
            "did you mean topk",
        ),
        ({"name": "x", "isolated": {}, "budget": [{"stage": "topk", "least": 1}]}, "no key least"),
    ],
)
def test_bad_policies_are_refused(raw, says):
    with pytest.raises(ValueError, match=says):
        parse_policy(raw)


def test_policies_by_name_and_by_file(tmp_path):
    assert [load_policy(name).name for name in SHIPPED] == list(SHIPPED)
    own = tmp_path / "own.toml"
    own.write_text('name = "own"\n[isolated]\nexcess = 2.0\n')
    assert load_policy(own).isolated == {"excess": 2.0}
    with pytest.raises(ValueError, match="did you mean strict"):
        load_policy("strickt")
    with pytest.raises(ValueError, match="no policy file"):
        load_policy(tmp_path / "none.toml")
    own.write_text("name = ")
    with pytest.raises(ValueError, match=r"own.toml is not a policy"):
        load_policy(own)
