from dataclasses import replace

import pytest
from typer.testing import CliRunner

from difftest.cli import app
from difftest.record import Finding, Record
from difftest.run_dir import RunDir
from difftest.scale.merge import merge
from difftest.scale.shards import Shard, plan_digest

UNITS = ["a-layer2", "b-layer2", "c-layer2", "d-layer2"]


def record(unit, **changes):
    case, _, layer = unit.rpartition("-layer")
    made = Record(case, int(layer), "csa", "bf16-k", "kv", "isolated", "exact stage", {"excess": 0.5}, {"excess": 1.0})
    return replace(made, **changes)


@pytest.fixture
def shard(tmp_path):
    """Makes the run directory of one shard of two."""

    def make(group, units=None, name=None, plan=UNITS, commit="abc", status="complete", found=None):
        units = units if units is not None else [UNITS[:2], UNITS[2:]][group - 1]
        facts = Shard(group, 2, plan_digest(plan), units, len(plan)).to_json()
        run = RunDir.create(
            tmp_path / (name or f"shard{group}"), environment={"commit": commit}, shard=facts, paths=["bf16-k"]
        )
        run.append(found or [record(unit) for unit in units])
        run.write_manifest(status=status)
        return run.path

    return make


def test_all_shards_make_one_whole_run(shard, tmp_path):
    merged = merge([shard(1), shard(2)], tmp_path / "all")
    assert (merged.exit_code, merged.problems) == (0, [])
    run = RunDir.open(tmp_path / "all")
    assert sorted(f"{one.case}-layer{one.layer}" for one in run.records()) == UNITS
    assert run.manifest["status"] == "complete" and run.manifest["environment"] == {"commit": "abc"}
    assert len(run.manifest["verdicts"]) == 4


@pytest.mark.parametrize(
    ("made", "says"),
    [
        ([{"group": 1}], ["shard 2 of 2 is missing"]),
        (
            [{"group": 1}, {"group": 1, "name": "again"}, {"group": 2}],
            [
                "shard 1 of 2 is there 2 times: shard1, again",
                "shard1 and again hold 2 of the same records; each counts once",
            ],
        ),
        ([{"group": 1}, {"group": 2, "units": UNITS[1:]}], ["b-layer2 is in several shards", "of the same records"]),
        ([{"group": 1}, {"group": 2, "units": UNITS[3:]}], ["1 cases are in no shard"]),
        ([{"group": 1}, {"group": 2, "plan": [*UNITS, "e-layer2"]}], ["is a shard of another plan", "is missing"]),
        ([{"group": 1}, {"group": 2, "status": "interrupted"}], ["shard2 is interrupted"]),
        ([{"group": 1}, {"group": 2, "commit": "def"}], ["the runs differ in commit: abc, def"]),
    ],
)
def test_what_is_missing_or_doubled_is_noticed(shard, tmp_path, made, says):
    merged = merge([shard(**one) for one in made], tmp_path / "all")
    assert merged.exit_code == 125
    assert len(merged.problems) == len(says)
    assert all(part in problem for part, problem in zip(says, merged.problems, strict=True))
    assert RunDir.open(tmp_path / "all").manifest["problems"] == merged.problems


def test_a_bug_in_any_shard_is_red(shard, tmp_path):
    bad = record("c-layer2", findings=[Finding("range", "entry 9 is past visible 8")])
    assert merge([shard(1), shard(2, found=[bad, record("d-layer2")])], tmp_path / "all").exit_code == 1


def test_the_command(shard, tmp_path):
    result = CliRunner().invoke(app, ["merge", str(shard(1)), "--out", str(tmp_path / "all")])
    assert result.exit_code == 125
    assert "problem: shard 2 of 2 is missing" in result.stdout
    again = CliRunner().invoke(app, ["merge", str(shard(2)), "--out", str(tmp_path / "all")])
    assert again.exit_code == 2 and "is not empty" in again.stderr
    none = CliRunner().invoke(app, ["merge", str(tmp_path), "--out", str(tmp_path / "new")])
    assert none.exit_code == 2 and "is not a run directory" in none.stderr
