import json

from difftest.report.evidence import load
from difftest.report.markdown import markdown

from .conftest import CASES


def test_green_is_ten_lines_or_fewer(run_dir):
    text = markdown(load([run_dir()], "default"))
    lines = text.splitlines()
    assert len(lines) <= 10
    assert lines[0] == "### ✅ difftest: agrees"
    assert "No stage of any path is outside its bound (2 paths on 2 cases and 2 layers)." in text
    assert "| `bf16-k` | 4 agrees | 0.9900, 0.9400 |" in lines


def test_red_names_divergence_offender_blame_and_command(run_dir):
    text = markdown(load([run_dir(bug=True)], "default"))
    assert text.startswith("### ❌ difftest: disagrees")
    assert "**First divergence**: `bf16-k` in `gaussian-2117` layer 2 (csa), stage `index_k`: row 3, entry 70" in text
    assert "**Worst offender**: `bf16-k` needle-5294 layer 14 `topk`: range: entry 9" in text, "a broken rule is worst"
    assert "**Blame**: `index_k` itself, not its inputs; compressed, index_q" in text
    assert "\n    difftest run --case gaussian-2117 --layer 2 --path bf16-k\n" in text
    assert "1 more:" in text and "- `bf16-k` needle-5294 layer 14: bug at topk (range)" in text


def test_the_base_branch_counts(run_dir, baseline):
    evidence = load([run_dir(), baseline], "default")
    text = markdown(evidence)
    assert evidence.exit_code == 1
    assert "**Against the base branch**: worse than the base: recall" in text
    assert "| needle-5294 layer 2 bf16-k topk recall | 0.99 | 0.95 | -0.04 | 0.001 | worse |" in text


def test_a_base_that_cannot_be_judged_is_not_green(run_dir, baseline):
    file = baseline / "baseline-result.json"
    raw = {**json.loads(file.read_text()), "exit_code": 125, "sentence": "cannot judge: 2 paired seeds", "rows": []}
    file.write_text(json.dumps(raw))
    evidence = load([run_dir(), baseline], "default")
    assert evidence.exit_code == 125
    assert "against the base branch: cannot judge: 2 paired seeds" in markdown(evidence)


def test_an_interrupted_or_incomplete_run_is_not_green(run_dir):
    from difftest.run_dir import RunDir

    folder = run_dir()
    RunDir.open(folder).write_manifest(status="interrupted", not_run=3)
    evidence = load([folder], "default")
    assert evidence.exit_code == 125
    text = markdown(evidence)
    assert text.startswith("### ⚠️ difftest: cannot judge")
    assert "- run is interrupted" in text and "- 3 planned stages of run were never run" in text


def test_runs_of_several_seeds_all_count(run_dir):
    from difftest.run_dir import RunDir

    first, second = run_dir("a"), run_dir("b", bug=True)
    cases = {name: {**case, "base_seed": 7} for name, case in CASES.items()}
    RunDir.open(second).write_manifest(cases=cases)
    both = load([first, second], "default")
    assert len(both.records) == 2 * len(load([first], "default").records)
    assert both.exit_code == 1 and both.first.stage == "index_k"


def test_several_directories_count_each_record_once(run_dir):
    one = load([run_dir("a"), run_dir("b")], "default")
    assert len(one.records) == len(load([run_dir("c")], "default").records)
