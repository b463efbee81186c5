"""First bad commits of real repositories: linear, merged, reverted, unbuildable in the middle, without endpoints."""

import json

import pytest

from difftest.diagnose import bisect_report
from difftest.diagnose.bisect import bisect_commits
from difftest.diagnose.ledger import Ledger
from difftest.diagnose.plans import CommitPlan, plan_to_json
from difftest.diagnose.trial import Aborted, CannotJudge, Command, Refused

STAGED = 'if grep -q bug code.txt; then echo \'{"stage": "score"}\'; exit 1; fi'


@pytest.mark.parametrize("bug_at", [2, 128, 257])
def test_256_commits_take_at_most_9_verdicts_and_leave_the_repository_alone(history, search, tmp_path, bug_at):
    repo = history.linear(257, bug_at)
    before = repo.state()
    outcome = search(repo, tmp_path / "run", STAGED, good=repo.sha[1])
    assert outcome.commits == 256
    assert outcome.verdicts <= 9
    assert outcome.culprit.sha == repo.sha[bug_at]
    assert outcome.stage == "score"
    assert outcome.exit_code == 0
    assert repo.state() == before
    revert = outcome.confirmations[-1]
    assert revert.answer == ("not run" if bug_at == 257 else "good")


def test_report_names_commit_author_date_subject_files_and_stage(history, search, tmp_path):
    repo = history.linear(12, 7)
    outcome = search(repo, tmp_path / "run", STAGED, good=repo.sha[1])
    bisect_report.save(outcome, tmp_path)
    markdown = (tmp_path / bisect_report.MARKDOWN).read_text()
    for fact in (repo.sha[7], "Ada Lovelace", "2023-11-14T22:20:20", "change 7", "bug7.txt, code.txt", "score"):
        assert fact in markdown
    raw = json.loads((tmp_path / bisect_report.JSON).read_text())
    assert raw["culprit"]["sha"] == repo.sha[7]
    assert raw["culprit"]["files"] == ["bug7.txt", "code.txt"]
    assert (raw["stage"], raw["confirmed"], raw["exit_code"]) == ("score", True, 0)


def test_commits_that_do_not_build_are_skipped(history, search, tmp_path):
    for number in range(1, 33):
        broken = {"broken": "x\n" if 14 <= number <= 19 else None}
        history.commit(
            f"change {number}", {"code.txt": "bug\n" if number >= 24 else "fine\n", "n": f"{number}\n"} | broken
        )
    repo = history.write()
    outcome = search(
        repo, tmp_path / "run", good=repo.sha[1], build="test ! -e broken || { echo no compiler; exit 2; }"
    )
    assert outcome.culprit.sha == repo.sha[24]
    skipped = [step for step in outcome.steps if step.answer == "skip"]
    assert skipped
    assert all(step.words == "skip: build failed: no compiler" for step in skipped)


def test_a_culprit_among_unbuildable_commits_is_narrowed_to_them(history, search, tmp_path):
    for number in range(1, 17):
        broken = {"broken": "x\n" if 8 <= number <= 10 else None}
        history.commit(
            f"change {number}", {"code.txt": "bug\n" if number >= 9 else "fine\n", "n": f"{number}\n"} | broken
        )
    repo = history.write()
    outcome = search(repo, tmp_path / "run", good=repo.sha[1], build="test ! -e broken")
    assert {commit.sha for commit in outcome.candidates} == {repo.sha[number] for number in (8, 9, 10, 11)}
    assert outcome.exit_code == 125
    assert outcome.sentence() == "the first bad commit is one of 4: those between could not be judged"


def test_a_culprit_on_a_merged_branch_is_found_there(history, search, tmp_path):
    base = history.commit("base", {"code.txt": "fine\n", "other.txt": "0\n"})
    side = history.commit("side 1", {"side.txt": "1\n"}, [base])
    culprit = history.commit("side 2 brings the bug", {"code.txt": "bug\n"}, [side])
    side = history.commit("side 3", {"side.txt": "3\n"}, [culprit])
    line = base
    for number in range(4):
        line = history.commit(f"main {number}", {"other.txt": f"{number + 1}\n"}, [line])
    merge = history.commit("merge side", {}, [line, side])
    history.commit("after", {"other.txt": "9\n"}, [merge])
    repo = history.write()
    outcome = search(repo, tmp_path / "run", good=repo.sha[base])
    assert outcome.culprit.sha == repo.sha[culprit]
    assert [check.answer for check in outcome.confirmations] == ["bad", "good", "good"]


def test_a_merge_of_two_good_sides_can_be_the_culprit(history, search, tmp_path):
    base = history.commit("base", {"a.txt": "old\n", "b.txt": "old\n"})
    first = history.commit("first side", {"a.txt": "new\n"}, [base])
    second = history.commit("second side", {"b.txt": "new\n"}, [base])
    merge = history.commit("merge", {"a.txt": "new\n", "b.txt": "new\n"}, [first, second])
    history.commit("after", {"c.txt": "1\n"}, [merge])
    repo = history.write()
    outcome = search(repo, tmp_path / "run", "! { grep -q new a.txt && grep -q new b.txt; }", good=repo.sha[base])
    assert outcome.culprit.sha == repo.sha[merge]
    assert outcome.culprit.parents == (repo.sha[first], repo.sha[second])
    before_it = [check for check in outcome.confirmations if check.what == "the commit before it"]
    assert [check.answer for check in before_it] == ["good", "good"]
    assert outcome.confirmations[-1].answer == "good"
    assert outcome.exit_code == 0


def test_a_reverted_and_reintroduced_bug_ends_at_a_commit_that_brings_it(history, search, tmp_path):
    texts = ["fine"] * 5 + ["bug"] * 3 + ["fine"] * 6 + ["bug"] * 4
    for number, text in enumerate(texts, 1):
        history.commit(f"change {number}", {"code.txt": f"{text}\n", "n": f"{number}\n"})
    repo = history.write()
    outcome = search(repo, tmp_path / "run", good=repo.sha[1])
    assert outcome.culprit.sha in (repo.sha[6], repo.sha[15])
    assert outcome.exit_code == 0


def test_a_revert_that_does_not_apply_is_told_and_does_not_spoil_the_result(history, search, tmp_path):
    for number in range(1, 9):
        history.commit(f"change {number}", {"code.txt": f"{'bug' if number >= 4 else 'fine'} {number}\n"})
    repo = history.write()
    outcome = search(repo, tmp_path / "run", good=repo.sha[1])
    assert outcome.culprit.sha == repo.sha[4]
    assert outcome.confirmations[-1].why == "does not apply cleanly: conflicts in code.txt"
    assert outcome.exit_code == 0


def test_a_second_fault_shows_in_the_revert_and_in_the_stage(history, search, tmp_path):
    history.commit("start", {"code.txt": "fine\n", "late.txt": "fine\n"})
    for number in range(2, 10):
        change = {"code.txt": "bug\n"} if number == 4 else {"n": f"{number}\n"}
        history.commit(f"change {number}", change | ({"late.txt": "bug\n"} if number == 9 else {}))
    repo = history.write()
    line = "for f in late code; do if grep -q bug $f.txt; then echo '{\"stage\": \"'$f'\"}'; exit 1; fi; done"
    outcome = search(repo, tmp_path / "run", line, good=repo.sha[1])
    assert (outcome.culprit.sha, outcome.stage) == (repo.sha[4], "code")
    assert "there may be two faults; search for one with --stage late" in outcome.notes[0]
    assert outcome.notes[1] == "reverting the commit does not make it pass: something later fails, too"
    narrowed = search(repo, tmp_path / "late", command=Command(line, stage="late"), good=repo.sha[3])
    assert {commit.sha for commit in narrowed.candidates} >= {repo.sha[9]}


def test_commits_that_leave_the_named_files_alone_are_not_run(history, search, tmp_path):
    for number in range(1, 129):
        touched = {"kernel/code.txt": f"{'bug' if number >= 90 else 'fine'} {number}\n"} if number % 30 == 0 else {}
        start = {"kernel/code.txt": "fine\n"} if number == 1 else {}
        history.commit(f"change {number}", {"n": f"{number}\n"} | start | touched)
    repo = history.write()
    outcome = search(repo, tmp_path / "run", "! grep -q bug kernel/code.txt", good=repo.sha[1], only=("kernel",))
    assert outcome.culprit.sha == repo.sha[90]
    assert outcome.verdicts <= 2
    assert (outcome.commits, outcome.unchanged) == (127, 123)
    asked = {step.sha for step in outcome.steps if step.purpose == "search"}
    assert asked <= {repo.sha[number] for number in (30, 60, 90, 120)}


def test_named_files_changed_on_a_merged_branch(history, search, tmp_path):
    base = history.commit("base", {"code.txt": "fine\n", "other.txt": "0\n"})
    side = history.commit("side 1", {"code.txt": "fine 1\n"}, [base])
    culprit = history.commit("side 2", {"code.txt": "bug\n"}, [side])
    line = base
    for number in range(6):
        line = history.commit(f"main {number}", {"other.txt": f"{number + 1}\n"}, [line])
    merge = history.commit("merge side", {"code.txt": "bug\n"}, [line, culprit])
    history.commit("after", {"other.txt": "9\n"}, [merge])
    repo = history.write()
    outcome = search(repo, tmp_path / "run", good=repo.sha[line], only=("code.txt",))
    assert outcome.culprit.sha == repo.sha[culprit]


def test_a_fault_outside_the_named_files_is_told(history, search, tmp_path):
    repo = history.linear(16, 9)
    with pytest.raises(CannotJudge, match=r"no commit after .* changes quiet.txt, .* leave --only out"):
        search(repo, tmp_path / "run", good=repo.sha[2], only=("quiet.txt",))


@pytest.mark.parametrize(("commits", "bug_at"), [(40, 35), (40, 3), (2, 2)])
def test_without_a_good_endpoint_one_is_looked_for(history, search, tmp_path, commits, bug_at):
    repo = history.linear(commits, bug_at)
    assert search(repo, tmp_path / "run").culprit.sha == repo.sha[bug_at]


def test_a_fault_as_old_as_the_history_has_no_first_commit(history, search, tmp_path):
    repo = history.linear(20, 1)
    with pytest.raises(CannotJudge, match=f"no good commit was found.*back to the first one .{repo.sha[1][:12]}"):
        search(repo, tmp_path / "run")


def test_swapped_endpoints_are_told_before_anything_runs(history, search, tmp_path):
    repo = history.linear(8, 4)
    with pytest.raises(Refused, match=r"--bad .* is an ancestor of --good HEAD: they look swapped"):
        search(repo, tmp_path / "run", "exit 200", good="HEAD", bad=repo.sha[1])


def test_a_fault_that_was_fixed_in_between_is_told(history, search, tmp_path):
    for number in range(1, 9):
        history.commit(
            f"change {number}", {"code.txt": "bug\n" if number < 5 else f"fine {number}\n", "n": f"{number}"}
        )
    repo = history.write()
    with pytest.raises(Refused, match=r"fixed in between, not introduced; .* invert the verdict"):
        search(repo, tmp_path / "run", good=repo.sha[1])


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"line": "true", "good": "HEAD~3"}, CannotJudge, "--bad HEAD passes, so there is nothing to search"),
        ({"line": "false", "good": "HEAD~3"}, CannotJudge, "--good HEAD~3 fails, like --bad HEAD: .* give --build"),
        ({"line": "exit 125", "good": "HEAD~3"}, CannotJudge, "--bad HEAD cannot be judged .exit code 125"),
        (
            {"line": "no-such-command", "good": "HEAD~3"},
            CannotJudge,
            "--bad HEAD cannot be judged .exit code 127: .*not found",
        ),
        ({"build": "false", "good": "HEAD~3"}, CannotJudge, "--bad HEAD cannot be judged .build failed: exit code 1"),
        ({"line": "exit 128", "good": "HEAD~3"}, Aborted, "stopped the search at .*exit code 128"),
        ({"line": "kill -SEGV $$", "good": "HEAD~3"}, Aborted, "exit code 139 .signal SIGSEGV."),
        ({"good": "nowhere"}, Refused, "--good nowhere is no commit of"),
        ({"good": "HEAD"}, Refused, "--good HEAD and --bad HEAD are the same commit"),
        ({"good": "HEAD~3", "only": ("nothing.txt",)}, Refused, "--only nothing.txt: no commit up to HEAD changed it"),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_the_repository_alone(history, search, tmp_path, options, error, sentence):
    repo = history.linear(8, 6)
    before = repo.state()
    with pytest.raises(error, match=sentence) as raised:
        search(repo, tmp_path / "run", **options)
    assert "\n" not in str(raised.value)
    assert repo.state() == before


def test_local_changes_are_refused_with_the_way_out(history, search, tmp_path):
    repo = history.linear(8, 6)
    (repo.root / "untracked.txt").write_text("mine")
    search(repo, tmp_path / "clean", good=repo.sha[1])
    (repo.root / "code.txt").write_text("edited")
    with pytest.raises(Refused, match=r"has local changes .code.txt.*git -C .* stash push"):
        search(repo, tmp_path / "run", good=repo.sha[1])
    outcome = search(repo, tmp_path / "forced", good=repo.sha[1], ignore_local_changes=True)
    assert outcome.culprit.sha == repo.sha[6]
    assert (repo.root / "code.txt").read_text() == "edited"


def test_not_a_repository(tmp_path):
    plan = CommitPlan(tmp_path, Command("true"))
    with pytest.raises(Refused, match="is not in a git repository; give a checkout"):
        bisect_commits(plan, Ledger.create(tmp_path / "run", plan_to_json(plan)))


def test_unrelated_histories(history, search, tmp_path):
    first = history.commit("one root", {"code.txt": "fine\n"})
    history.commit("another root", {"code.txt": "bug\n"}, [])
    repo = history.write()
    with pytest.raises(Refused, match="have no common history"):
        search(repo, tmp_path / "run", good=repo.sha[first])


def test_python_modules_of_one_size_are_not_mixed_up_by_the_byte_code_cache(history, search, tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    for number in range(1, 17):
        history.commit(f"change {number}", {"module.py": f"fault = {number >= 11:1d}\n", "n": f"{number}\n"})
    repo = history.write()
    line = 'python3 -c "import module, sys; sys.exit(module.fault)"'
    same_time = "touch -d @1000000000 module.py"
    assert search(repo, tmp_path / "run", line, good=repo.sha[1], build=same_time).culprit.sha == repo.sha[11]


def test_local_build_outputs_never_block_a_checkout(history, search, tmp_path):
    repo = history.linear(16, 9)
    build = "echo generated > note3.txt; echo generated > code.new; mkdir -p note99"
    assert search(repo, tmp_path / "run", good=repo.sha[1], build=build).culprit.sha == repo.sha[9]


def test_a_hung_verdict_is_stopped_and_skipped(history, search, tmp_path):
    repo = history.linear(4, 3)
    with pytest.raises(CannotJudge, match=r"--bad HEAD cannot be judged .took longer than 0.2 s"):
        search(repo, tmp_path / "run", good=repo.sha[1], command=Command("sleep 60", timeout=0.2))
