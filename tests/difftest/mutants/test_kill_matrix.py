"""The kept matrix still holds: every gate catches what it caught, and names the stage it named."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from difftest.mutants import matrix, page
from difftest.mutants.bench import Bench
from difftest.mutants.gates import calc_diff, gates
from difftest.mutants.registry import PATHS, mutants
from difftest.policy import load_policy

POLICY = load_policy("default")
OWN_STAGES = {"sglang-fp8-model": None, "bf16-k": {"index_k", "index_q", "head_weight", "score"}}
"""Stages that are a path's own code; `bf16-k` has the others from the other path, where they are checked."""


@pytest.fixture(scope="module")
def rows():
    torch.set_num_threads(1)
    return matrix.load()


def test_the_matrix_has_a_row_for_every_mutant_and_path(rows):
    assert [(row.mutant, row.path) for row in rows] == [(mutant.name, path) for mutant, path in matrix.pairs()]
    assert all(row.report == mutants()[row.mutant].report for row in rows)


def test_every_mutant_is_caught_and_nearly_every_one_at_its_stage(rows):
    assert [row.mutant for row in rows if not row.killed] == []
    assert sum(row.named_right for row in rows) >= 0.95 * len(rows)


def test_the_page_is_that_of_the_matrix(rows):
    assert page.PAGE.read_text() == page.text(rows)


@pytest.mark.parametrize("path", PATHS)
def test_no_isolated_gate_lost_a_mutant(rows, path):
    """The stage at fault alone, on faultless stages: what it shows, and that it is the first to show anything."""
    bench, stages = Bench(), OWN_STAGES[path]
    kept = {row.mutant: row for row in rows if row.path == path}
    for mutant, _ in matrix.pairs(paths=[path]):
        row, stage = kept[mutant.name], mutant.stage_in(path)
        if stages is not None and stage not in stages:
            continue
        caught = gates([bench.check_stage(mutant, path)], POLICY)
        lost = {gate for gate in row.killed_by if gate.startswith(f"{stage} isolated")} - caught
        assert not lost, (mutant.name, lost)
        assert row.stage_named == (stage if caught else ""), mutant.name


def test_no_gate_on_the_result_lost_its_mutants(rows):
    """For each gate on the result one mutant that it caught, run to the end."""
    chosen = matrix.cover(rows)
    assert chosen and {gate for row in chosen for gate in row.killed_by} >= {
        gate for row in rows for gate in row.killed_by if "isolated" not in gate
    }
    bench = Bench()
    made = [
        matrix.row_of(bench.compare(mutants()[row.mutant], row.path), mutants()[row.mutant], row.path, POLICY)
        for row in chosen
    ]
    assert matrix.lost(chosen, made) == []


def test_a_lost_gate_and_another_stage_are_told(rows):
    old = rows[0]
    worse = replace(old, killed_by=old.killed_by[1:], stage_named="")
    assert matrix.lost([old], [worse]) == [
        f"{old.mutant} in {old.path}: no longer caught by {old.killed_by[0]}",
        f"{old.mutant} in {old.path}: named nothing, before {old.stage_named}",
    ]
    assert matrix.lost([worse], [old]) == [f"{old.mutant} in {old.path}: named {old.stage_named}, before nothing"]


def test_a_matrix_reads_as_it_was_written(rows, tmp_path):
    matrix.save(rows[:5], tmp_path / "rows.json")
    assert matrix.load(tmp_path / "rows.json") == rows[:5]
    (tmp_path / "rows.json").write_text('{"schema": 2, "rows": []}')
    with pytest.raises(ValueError, match="its schema is 2, this version reads 1; make it again with `make mutants`"):
        matrix.load(tmp_path / "rows.json")


def test_faults_of_several_kinds_pass_the_usual_gates(rows):
    """What this tool is for: no report's fault may need to be large enough for calc_diff or recall."""
    unseen = [row for row in rows if not row.calc_diff_score_would and not row.recall_would]
    assert Counter(row.stage_seeded for row in unseen)["index_k"] > 0
    assert any(row.mutant == "n5-no-hadamard" for row in unseen)


def test_calc_diff_is_deep_gemms():
    x = torch.tensor([1.0, 2.0, -3.0])
    assert calc_diff(x, x) == 0 and calc_diff(torch.zeros(3), torch.zeros(3)) == 0
    assert calc_diff(2 * x, x) == pytest.approx(1 - 4 / 5)
    assert calc_diff(-x, x) == pytest.approx(2)
