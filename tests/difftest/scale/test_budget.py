import json

import pytest
from difftest.cases import registry

from difftest.scale.budget import Candidate, choose, parse_budget, read_kills
from difftest.scale.needs import FIT, SCRATCH, memory_bytes, recorded_seconds, seconds


@pytest.mark.parametrize(("text", "want"), [("90", 90), ("90s", 90), ("6m", 360), ("1h30m", 5400), ("0.5m", 30)])
def test_budgets(text, want):
    assert parse_budget(text) == want


@pytest.mark.parametrize("text", ["", "six", "6 minutes", "m", "0s", "-3s"])
def test_what_is_no_budget(text):
    with pytest.raises(ValueError, match="budget"):
        parse_budget(text)


def test_the_order_is_new_kills_for_their_cost():
    dear = Candidate("dear", 10, frozenset("abcdef"))
    cheap = Candidate("cheap", 1, frozenset("ab"))
    same = Candidate("same", 1, frozenset("ab"))
    plain = Candidate("plain", 0.5)
    choice = choose([plain, dear, same, cheap], 100)
    assert choice.chosen == ["same", "dear", "cheap", "plain"], "what is already killed counts no more"
    assert choice.seconds == 12.5
    assert choice.left_out == []


def test_what_does_not_fit_is_listed_with_what_only_it_kills():
    choice = choose(
        [Candidate("one", 5, frozenset("a")), Candidate("two", 50, frozenset("ab")), Candidate("three", 4)], 10
    )
    assert choice.chosen == ["one", "three"]
    assert [unit.to_json() for unit in choice.left_out] == [{"name": "two", "seconds": 50, "lost": ("b",)}]


def test_something_runs_under_any_budget_and_workers_share_it():
    units = [Candidate(name, 10) for name in "abcd"]
    assert choose(units, 1).chosen == ["a"]
    assert choose(units, 20, workers=2).chosen == list("abcd")


def matrix(*rows):
    names = ("mutant", "case", "stage_seeded", "killed_by")
    return json.dumps({"schema": 1, "rows": [{"path": "bf16-k", **dict(zip(names, row, strict=True))} for row in rows]})


def test_a_mutant_counts_for_cases_that_would_show_it(tmp_path):
    file = tmp_path / "kill_matrix.json"
    assert read_kills(file) == []
    rows = [
        ("lost-chunk", "mutant-chunked", "compressed", ["excess"]),
        ("tie-order", "mutant-near-ties", "topk", ["range"]),
        ("survivor", "mutant-chunked", "score", []),
        ("named", "swa-1029", "kv", ["excess"]),
    ]
    file.write_text(matrix(*rows))
    known = registry.all_cases()
    shown = {
        name: {kill.mutant for kill in read_kills(file) if kill.also_by(known[name], known[name].layers[0])}
        for name in ("outlier-heavy-2999", "tie-band-3001", "gaussian-2117", "swa-1029", "hca-4500")
    }
    assert shown["outlier-heavy-2999"] == {"lost-chunk@bf16-k"}, "chunked, and any data shows it"
    assert shown["tie-band-3001"] == {"tie-order@bf16-k", "named@bf16-k"}, "one needs this family, one any"
    assert shown["gaussian-2117"] == shown["hca-4500"] == shown["swa-1029"] == {"named@bf16-k"}


def test_another_kind_of_file_is_no_kill_matrix(tmp_path):
    file = tmp_path / "kill_matrix.json"
    file.write_text('{"columns": 3}')
    with pytest.raises(ValueError, match="is no kill matrix"):
        read_kills(file)


def test_a_recorded_time_comes_before_a_siblings_and_an_estimate(tmp_path):
    case = registry.all_cases()["gaussian-2117"]
    assert seconds(case, 2, {"gaussian-2117-layer2": 3.5}) == 3.5
    assert seconds(case, 14, {"gaussian-2117-layer2": 3.5}) == 3.5
    larger = registry.all_cases()["needle-22597"]
    assert 0 < seconds(case, 2, {}) < seconds(larger, 2, {})
    file = tmp_path / "costs.json"
    file.write_text("[]")
    with pytest.raises(ValueError, match="no recorded seconds"):
        recorded_seconds(file)


def test_estimates_fit_what_was_recorded():
    known, recorded = registry.all_cases(), recorded_seconds()
    assert len(recorded) >= 20
    for name, spent in recorded.items():
        case, _, layer = name.rpartition("-layer")
        estimate = seconds(known[case], int(layer), {})
        assert spent / FIT < estimate < spent * FIT, f"{name}: {estimate:.2f} s, recorded {spent:.2f} s"


def test_memory_grows_with_what_a_case_holds():
    known = registry.all_cases()
    need = {
        name: memory_bytes(known[name], known[name].layers[0]) for name in ("swa-1029", "gaussian-2117", "prefill-8257")
    }
    assert SCRATCH < need["swa-1029"] < need["gaussian-2117"] < need["prefill-8257"]
    assert need["prefill-8257"] > 8257 * 64 * 512 * 8, "every row's attention output in fp64"
