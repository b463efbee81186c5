"""Baselines: what a head does to accuracy and latency, on synthetic records with known changes and known noise."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from difftest import baseline_cli
from difftest.baseline import Comparison, Key, Paired, Timed, compare, save
from difftest.baseline_policy import load_baseline_policy
from difftest.baseline_stats import bootstrap_interval, noise_floor, seeds_needed, sign_flip
from difftest.baseline_verdict import judge
from difftest.record import Finding, Record, append_records

DEFAULT = load_baseline_policy("default")
SEEDS = 12


def comparison(rows, timed=()):
    """`rows`: {metric: (base values, head values)} of one stage."""
    paired = [
        Paired(Key("case", 2, "bf16-k", "topk", "accumulated", metric), list(range(len(base))), list(base), list(head))
        for metric, (base, head) in rows.items()
    ]
    return Comparison("base", "head", paired, list(timed))


def noisy(rng, mean, spread, shift=0.0, seeds=SEEDS):
    """Values of both sides: common data of a seed, and noise of each side."""
    data = mean + spread * rng.standard_normal(seeds)
    return data + spread / 4 * rng.standard_normal(seeds), data + shift + spread / 4 * rng.standard_normal(seeds)


def answers(judged):
    return {row.key.metric: row.answer for row in judged.rows}


def test_a_drop_of_one_point_of_recall_over_12_seeds_is_found_among_300_rows():
    rng = np.random.default_rng(1)
    rows = {f"score_error_{number}": noisy(rng, 0.3, 0.02) for number in range(300)}
    rows["recall"] = noisy(rng, 0.97, 0.004, shift=-0.01)
    judged = judge(comparison(rows), DEFAULT)
    assert [metric for metric, answer in answers(judged).items() if answer == "worse"] == ["recall"]
    assert judged.exit_code == 1
    found = next(row for row in judged.rows if row.key.metric == "recall")
    assert found.mean == pytest.approx(-0.01, abs=0.001)
    assert found.interval[0] < found.mean < found.interval[1] < 0
    assert found.effect < -3
    assert "case layer 2 bf16-k topk recall (accumulated) moved by -0.0" in judged.sentence()


def test_200_null_comparisons_raise_no_alarm():
    """At alpha 1e-3 a comparison of 20 rows alarms with probability 1e-3, 200 of them with 0.18; this draw has none."""
    rng = np.random.default_rng(2)
    rows = [f"recall_{number}" for number in range(20)]
    for _ in range(200):
        judged = judge(comparison({metric: noisy(rng, 0.9, 0.004) for metric in rows}), DEFAULT)
        assert judged.exit_code == 0
        assert set(answers(judged).values()) == {"noise"}


def test_the_chance_of_any_false_alarm_is_alpha_for_all_rows_together():
    """400 null comparisons of 30 rows at 0.05: 20 alarms are expected, standard deviation 4.4; 36 is 3.7 above."""
    rng = np.random.default_rng(3)
    alarms = sum(bool((sign_flip(rng.standard_normal((30, 9))).adjusted <= 0.05).any()) for _ in range(400))
    assert alarms <= 36


def test_sign_flip_is_the_exact_permutation_distribution():
    differences = np.array([[1.0, 1.0, 1.0, 1.0], [3.0, -1.0, 2.0, 0.5], [0.0, 0.0, 0.0, 0.0]])
    signs = np.array(np.meshgrid(*[[1, -1]] * 4)).reshape(4, -1).T
    test = sign_flip(differences)
    for row in (0, 1):
        sums = np.abs(signs @ differences[row])
        assert test.p[row] == pytest.approx(np.mean(sums >= abs(differences[row].sum()) - 1e-12))
    assert test.p[2] == 1.0
    assert (test.adjusted >= test.p).all()


def test_rows_with_missing_seeds_use_the_seeds_they_have():
    full = np.ones((1, 8))
    holed = np.concatenate([np.ones((1, 8)), np.full((1, 8), np.nan)])
    holed[1, :3] = 1.0
    test = sign_flip(holed)
    assert test.p[0] == sign_flip(full).p[0] == 2.0**-7
    assert test.p[1] == 2.0**-2


def test_many_seeds_are_drawn_and_never_give_zero():
    test = sign_flip(np.ones((1, 60)))
    assert 0 < test.p[0] < 1e-4
    assert sign_flip(np.where(np.arange(60) % 2, 1.0, -1.0)[None]).p[0] == 1.0


def test_seeds_needed_is_where_the_smallest_p_reaches_alpha():
    for alpha in (1e-2, 1e-3, 0.05):
        needed = seeds_needed(alpha)
        assert sign_flip(np.ones((1, needed))).p[0] <= alpha < sign_flip(np.ones((1, needed - 1))).p[0]


@pytest.mark.parametrize(
    ("metric", "shift", "answer"),
    [
        ("recall", -0.01, "worse"),
        ("recall", 0.01, "better"),
        ("recall_worst", -0.0005, "moved"),
        ("value_recall_p1", -0.01, "worse"),
        ("compressed_codes_equal", -0.01, "worse"),
        ("swapped", 0.01, "worse"),
        ("relative_error", 0.01, "worse"),
        ("relative_error", -0.01, "better"),
        ("gap_at_cut", -0.01, "moved"),
        ("gap_at_cut", 0.01, "moved"),
        ("recall", 0.0, "same"),
    ],
)
def test_directions_and_tolerated_shifts(metric, shift, answer):
    base = np.linspace(0.4, 0.5, SEEDS)
    assert answers(judge(comparison({metric: (base, base + shift)}), DEFAULT)) == {metric: answer}


def test_isolated_metrics_fail_only_where_the_policy_says_so():
    base = np.linspace(0.4, 0.5, SEEDS)
    key = Key("case", 2, "bf16-k", "score", "isolated", "excess")
    made = Comparison("base", "head", [Paired(key, list(range(SEEDS)), list(base), list(base + 0.1))], [])
    assert (answers(judge(made, DEFAULT)), judge(made, DEFAULT).exit_code) == ({"excess": "moved"}, 0)
    assert judge(made, load_baseline_policy("strict")).exit_code == 1


def test_harm_at_one_seed_fails_though_it_is_no_trend():
    base = np.full(SEEDS, 0.98)
    head = base.copy()
    head[7] = 0.40
    judged = judge(comparison({"recall": (base, head)}), DEFAULT)
    assert judged.exit_code == 1
    assert "is off by -0.58 at seed 7, limit 0.05" in judged.sentence()


def test_too_few_seeds_cannot_judge_and_say_how_many_are_needed():
    base = np.full(5, 0.98)
    judged = judge(comparison({"recall": (base, base - 0.01)}), DEFAULT)
    assert (answers(judged), judged.exit_code) == ({"recall": "too few seeds"}, 125)
    assert "5 paired seeds cannot tell a change from noise at 0.001; run at least 11" in judged.sentence()
    assert judge(comparison({"recall": (base, base)}), DEFAULT).exit_code == 0


def test_a_result_is_judged_again_under_another_policy():
    base = np.linspace(0.9, 0.95, SEEDS)
    made = comparison({"recall": (base, base - 0.0008)})
    assert judge(made, DEFAULT).exit_code == 0
    stored = Comparison.from_json(json.loads(json.dumps(made.to_json())))
    assert stored == made
    assert judge(stored, load_baseline_policy("strict")).exit_code == 1


def timed(rng, ratio, spread=0.02, samples=24):
    base = np.exp(spread * rng.standard_normal(samples)) * 1e-3
    head = np.exp(spread * rng.standard_normal(samples)) * 1e-3 * ratio
    return Timed("bf16-k", "score", list(base), list(head), list(zip(base[::2], base[1::2], strict=True)))


@pytest.mark.parametrize(
    ("ratio", "spread", "answer", "code"),
    [(1.0, 0.02, "same", 0), (1.15, 0.02, "slower", 1), (0.85, 0.02, "faster", 0), (1.03, 0.01, "same", 0)],
)
def test_latency_outside_the_noise_floor(ratio, spread, answer, code):
    judged = judge(comparison({"recall": ([1.0], [1.0])}, [timed(np.random.default_rng(4), ratio, spread)]), DEFAULT)
    row = judged.speeds[0]
    assert (row.answer, judged.exit_code) == (answer, code)
    assert row.interval[0] < row.ratio < row.interval[1]
    assert row.ratio == pytest.approx(ratio, rel=0.03)
    assert 0 < row.floor < 0.05


def test_a_noisy_machine_cannot_judge_latency():
    row = timed(np.random.default_rng(5), 1.5, spread=0.8, samples=12)
    judged = judge(comparison({"recall": ([1.0], [1.0])}, [row]), DEFAULT)
    assert (judged.speeds[0].answer, judged.exit_code) == ("cannot judge", 125)
    assert "the noise floor is" in judged.sentence()


def test_latency_never_alarms_on_null_comparisons():
    rng = np.random.default_rng(6)
    for _ in range(100):
        judged = judge(comparison({"recall": ([1.0], [1.0])}, [timed(rng, 1.0, 0.05)]), DEFAULT)
        assert judged.speeds[0].answer in ("same", "cannot judge")


def test_the_noise_floor_shrinks_with_pairs_and_the_interval_covers():
    rng = np.random.default_rng(7)
    repeats = 0.1 * rng.standard_normal(200)
    assert noise_floor(repeats, 64, 0.99) < noise_floor(repeats, 4, 0.99) < 0.4
    draws = [bootstrap_interval(rng.standard_normal(30), 0.95) for _ in range(200)]
    assert sum(low <= 0 <= high for low, high in draws) >= 175


def write(folder, seeds, change=None, skip=(), base_seed_in_run=False):
    """One run a seed with two cases; `change(record) -> record` alters the head."""
    for seed in seeds:
        run = folder / f"seed-{seed}"
        run.mkdir(parents=True)
        records = []
        for case in ("long", "short"):
            facts = {"seconds": 0.001 * (1 + 0.01 * (seed % 3))} | ({} if base_seed_in_run else {"seed": seed})
            metrics = {"recall": 0.97 + 0.001 * seed, "rows": 32.0}
            records.append(Record(case, 2, "csa", "bf16-k", "topk", "accumulated", "oracle", metrics, facts=facts))
            exact = {"excess": 0.5, "equal_share": 0.9999}
            records.append(Record(case, 2, "csa", "bf16-k", "score", "isolated", "exact stage", exact, facts=facts))
        records = [record for record in records if record.case not in skip]
        append_records(run / "records.jsonl", map(change, records) if change else records)
        cases = {case: {"base_seed": seed} for case in ("long", "short")} if base_seed_in_run else {}
        (run / "run.json").write_text(json.dumps({"cases": cases, "environment": {"gpu": "one", "torch": "2"}}))


def lowered(record):
    shift = {"recall": record.metrics["recall"] - 0.01} if "recall" in record.metrics else {}
    return Record(**{**record.__dict__, "metrics": {**record.metrics, **shift}})


def test_runs_on_disk_are_paired_by_seed(tmp_path):
    write(tmp_path / "base", range(SEEDS))
    write(tmp_path / "head", range(SEEDS), lowered)
    made = compare(tmp_path / "base", tmp_path / "head")
    assert {row.key.metric for row in made.paired} == {"recall", "rows", "excess", "equal_share"}
    judged = judge(made, DEFAULT)
    assert {(row.key.case, row.answer) for row in judged.rows if row.key.metric == "recall"} == {
        ("long", "worse"),
        ("short", "worse"),
    }
    assert "rows" not in answers(judged)


def test_the_seed_may_stand_in_the_run_instead_of_the_record(tmp_path):
    write(tmp_path / "base", range(SEEDS), base_seed_in_run=True)
    write(tmp_path / "head", range(SEEDS), lowered)
    made = compare(tmp_path / "base", tmp_path / "head")
    assert made.unused == made.missing == []
    assert all(row.seeds == list(range(SEEDS)) for row in made.paired)


def test_a_saved_baseline_equals_the_runs_it_was_made_of(tmp_path):
    write(tmp_path / "base", range(SEEDS), base_seed_in_run=True)
    assert save(tmp_path / "base", tmp_path / "kept") == 4 * SEEDS
    made = compare(tmp_path / "kept", tmp_path / "base")
    assert all(row.base == row.head for row in made.paired)
    assert made.unused == made.missing == []
    with pytest.raises(ValueError, match="a baseline is never overwritten unasked; pass --replace"):
        save(tmp_path / "base", tmp_path / "kept")
    assert save(tmp_path / "base", tmp_path / "kept", replace_old=True) == 4 * SEEDS
    with pytest.raises(ValueError, match=r"is not empty.*name another directory"):
        save(tmp_path / "kept", tmp_path / "base", replace_old=True)


def test_unused_and_missing_baselines_are_reported(tmp_path):
    write(tmp_path / "base", range(SEEDS), skip=("short",))
    write(tmp_path / "head", range(1, SEEDS + 1), skip=("long",))
    made = compare(tmp_path / "base", tmp_path / "head")
    assert made.unused == ["long bf16-k (all of it)"]
    assert made.missing == ["short bf16-k (all of it)"]
    assert judge(made, DEFAULT).exit_code == 125
    write(tmp_path / "more", range(1, SEEDS + 1), skip=("short",))
    seeds = compare(tmp_path / "base", tmp_path / "more")
    assert all(name.endswith("seed 0") for name in seeds.unused)
    assert all(name.endswith(f"seed {SEEDS}") for name in seeds.missing)
    assert judge(seeds, DEFAULT).exit_code == 0
    assert judge(seeds, load_baseline_policy("strict")).exit_code == 1


def test_new_findings_and_lost_numbers_fail(tmp_path):
    def broken(record):
        facts = {**record.__dict__}
        if record.stage == "topk":
            facts["findings"] = [Finding("unique", "entry 3 twice", {"row": 1})]
        else:
            facts["metrics"] = {**record.metrics, "excess": float("nan")}
        return Record(**facts)

    write(tmp_path / "base", range(SEEDS))
    write(tmp_path / "head", range(SEEDS), broken)
    judged = judge(compare(tmp_path / "base", tmp_path / "head"), DEFAULT)
    assert judged.exit_code == 1
    assert "new finding: long layer 2 bf16-k topk: unique" in judged.fails
    assert "long layer 2 bf16-k score excess (isolated): nan at seed 0, was 0.5" in judged.fails


def test_latencies_of_different_machines_are_not_compared(tmp_path):
    write(tmp_path / "base", range(SEEDS))
    write(tmp_path / "head", range(SEEDS))
    assert compare(tmp_path / "base", tmp_path / "head").timed[0].stage == "score"
    for file in (tmp_path / "head").rglob("run.json"):
        file.write_text(json.dumps({"environment": {"gpu": "two"}}))
    made = compare(tmp_path / "base", tmp_path / "head")
    assert (made.mixed, made.timed) == (["gpu: one against two"], [])


def invoke(*arguments):
    return CliRunner().invoke(baseline_cli.app, [str(argument) for argument in arguments])


def test_commands(tmp_path):
    write(tmp_path / "base", range(SEEDS))
    write(tmp_path / "head", range(SEEDS), lowered)
    assert invoke("save", tmp_path / "base", tmp_path / "kept").exit_code == 0
    done = invoke("compare", tmp_path / "kept", tmp_path / "head", "--out", tmp_path / "result")
    assert done.exit_code == 1
    lines = done.stdout.strip().splitlines()
    assert lines[0].split()[0] == "metric"
    assert "worse" in lines[1]
    assert lines[-1].startswith("worse than the base: long layer 2 bf16-k topk recall")
    assert "noise floor" in done.stdout
    assert (tmp_path / "result" / "baseline-result.md").read_text().startswith("**worse than the base")
    (tmp_path / "lax.toml").write_text('extends = "default"\n[tolerated]\n"recall*" = 0.02\n')
    again = invoke("judge", tmp_path / "result", "--policy", tmp_path / "lax.toml", "--json")
    assert again.exit_code == 0
    assert json.loads(again.stdout)["policy"] == "lax"


LINE = Record("c", 2, "csa", "p", "topk", "accumulated", "oracle", {"recall": 0.125}, facts={"seed": 777}).to_json()
RUN = "mkdir {out} && echo '" + LINE.replace("777", "'{seed}'") + "' > {out}/records.jsonl; echo {seed} SIDE >> order"


def command_of(side, recall):
    return RUN.replace("SIDE", side).replace("0.125", recall)


def test_base_and_head_run_alternately_and_go_on_after_an_interrupt(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base, head = command_of("base", "0.98"), command_of("head", "0.96")
    assert invoke("run", base, head, "--out", "cmp", "--seeds", 2).exit_code == 125
    done = invoke("run", base, head, "--out", "cmp")
    assert done.exit_code == 1, done.output
    order = (tmp_path / "order").read_text().splitlines()
    assert order[:4] == ["0 base", "0 head", "1 head", "1 base"]
    assert len(order) == 22
    assert "moved by -0.02" in done.stdout
    failing = invoke("run", "echo no device >&2; exit 125 # {out}", head, "--out", "other")
    assert failing.exit_code == 125
    assert "base seed 0 ended with exit code 125: no device" in failing.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("compare", "none", "none"), "none holds no records.jsonl; give a directory that"),
        (("save", "none", "out"), "none holds no records.jsonl"),
        (("judge", "none"), "none does not exist; give what `baseline compare --out` wrote"),
        (("judge", "list.json"), "is no comparison of schema"),
        (("judge", "torn.json"), "torn.json cannot be judged"),
        (("compare", "torn", "torn"), "records.jsonl:1 is not a difftest record"),
        (("compare", "empty", "empty"), "empty holds no records"),
        (("run", "true", "true {out}", "--out", "x"), "the base command does not use {out}"),
        (
            ("run", "true {out}", "true {out}", "--out", "x", "--policy", "lenient"),
            "policy 'lenient' is none of default, strict",
        ),
    ],
)
def test_bad_input_is_one_sentence(tmp_path, monkeypatch, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "torn.json").write_text("{")
    for name, text in (("torn", '{"schema": 1}\n\n'), ("empty", "")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "records.jsonl").write_text(text)
    done = invoke(*arguments)
    assert done.exit_code == 2
    assert sentence in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("alpha = ", "is not TOML"),
        ("alpha = 0.01", "not set; set it, or write extends"),
        ('extends = "lenient"', "extends = 'lenient' is none of default, strict, exploratory"),
        ('extends = "default"\nalfa = 1', "unknown key alfa; keys are alpha"),
        ('extends = "default"\nalpha = 2.0', "alpha = 2.0 is no error probability"),
        ('extends = "default"\nlatency_level = 95', "latency_level = 95 is no confidence"),
        ('extends = "default"\nunpaired = "ignore"', "unpaired = 'ignore'; write"),
        ('extends = "default"\n[tolerated]\n"recall*" = "few"', "'few' is no size"),
    ],
)
def test_policies_with_mistakes(tmp_path, text, sentence):
    (tmp_path / "policy.toml").write_text(text)
    with pytest.raises(ValueError, match=sentence):
        load_baseline_policy(str(tmp_path / "policy.toml"))
