"""Quality against the oracle: recall, certified swaps, error by cause, common factors."""

from dataclasses import replace

import pytest
import torch
from difftest.reference.attention import attn_query, packed_selection
from difftest.reference.indexer import score_layer
from difftest.reference.inputs import LayerInputs
from difftest.reference.rope import rope_table

from difftest import accumulated_attention, accumulated_topk
from difftest.accumulated import change, check_accumulated
from difftest.certify import epsilon
from difftest.paths.base import Declaration
from difftest.paths.oracle import Oracle
from difftest.trace import Trace


@pytest.fixture(scope="module")
def oracle(bench) -> Trace:
    return Oracle().run(bench.layer(), "small")


def with_stage(trace: Trace, **stages: object) -> Trace:
    mixed = Trace("small", trace.layer, "model", dict(trace.stages))
    for stage, value in stages.items():
        mixed.stages[stage] = {**trace[stage], "value": value}
    return mixed


def test_oracle_against_itself_is_perfect(bench, oracle):
    for stage in oracle.stages:
        record = check_accumulated(stage, bench.layer(), oracle, oracle, Oracle.declares)
        assert not record.findings
        if stage == "topk":
            assert record.metrics["recall_worst"] == 1
            assert record.metrics["swapped"] == 0
        elif stage == "score":
            assert record.metrics["error"] == 0
        else:
            assert record.metrics["relative_error"] == 0


@pytest.mark.parametrize(("declares", "least"), [("fp32", 0.995), ("bf16", 0.97), ("fp8", 0.9), ("published", 0.75)])
def test_swaps_of_faultless_paths_are_explained(bench, declares, least):
    """Every format swaps what its own width explains, over several seeds, and recall follows the format."""
    recalls = []
    for seed in range(4):
        inputs = bench.inputs(seed=seed, lengths=(2071, 1501))
        truth = Oracle().run(inputs, "small", upto="score")
        truth.stages["topk"] = Oracle().stage("topk", inputs, truth)
        path = bench.model(bench.declarations[declares])
        trace = path.run(inputs, "small", upto="topk")
        record = check_accumulated("topk", inputs, trace, truth, path.declares)
        assert not record.findings, record.findings
        assert record.metrics["unexplained"] == 0
        recalls.append(record.metrics["recall"])
    assert sum(recalls) / len(recalls) > least
    assert declares in ("fp32", "bf16") or sum(recalls) / len(recalls) < 0.999


def test_swap_beyond_the_format_is_found_whatever_the_recall(bench, oracle):
    """One entry far below the cut is selected instead of one far above: recall barely moves."""
    inputs, declares = bench.layer(), bench.declarations["bf16"]
    score, chosen = oracle.value("score"), oracle.value("topk").clone()
    row = int((inputs.visible > 16).nonzero()[0])
    count = int(inputs.visible[row])
    best, worst = int(score[row, :count].argmax()), int(score[row, :count].argmin())
    chosen[row, (chosen[row] == best).nonzero()[0, 0]] = worst
    record = check_accumulated("topk", inputs, with_stage(oracle, topk=chosen), oracle, declares)
    assert record.metrics["recall"] > 0.98
    assert [finding.rule for finding in record.findings] == ["unexplained_swap"]
    assert record.findings[0].where["row"] == row
    assert record.metrics["swap_excess"] > 1


def test_lost_mass_is_the_mass_of_dropped_entries(bench, oracle):
    inputs = bench.layer()
    chosen = oracle.value("topk").clone()
    record = check_accumulated("topk", inputs, oracle, oracle, Oracle.declares)
    assert record.metrics["lost_mass_mean"] == 0
    chosen[:, 4:] = -1
    some = check_accumulated("topk", inputs, with_stage(oracle, topk=chosen), oracle, Oracle.declares)
    chosen[:] = -1
    every = check_accumulated("topk", inputs, with_stage(oracle, topk=chosen), oracle, Oracle.declares)
    assert 0 < some.metrics["lost_mass_mean"] < every.metrics["lost_mass_mean"] < 1


def test_census_counts_ties(bench, oracle):
    inputs = bench.layer()
    score = oracle.value("score").clone()
    row = int((inputs.visible > 16).nonzero()[0])
    count = int(inputs.visible[row])
    order = score[row, :count].argsort(descending=True)
    score[row, order[12:20]] = float(score[row, order[12]])
    tied = with_stage(oracle, score=score)
    record = check_accumulated("topk", inputs, oracle, tied, Oracle.declares)
    assert record.metrics["equal_at_cut"] == 8
    assert record.metrics["tied_rows"] == 1
    assert record.metrics["gap_least"] == 0


def test_recall_is_blind_to_a_common_factor_and_the_score_is_not(bench, oracle):
    inputs, score = bench.layer(), oracle.value("score")
    doubled = with_stage(oracle, score=2 * score)
    record = check_accumulated("topk", inputs, doubled, oracle, Oracle.declares)
    assert record.metrics["recall"] == 1
    record = check_accumulated("score", inputs, doubled, oracle, Oracle.declares)
    assert [finding.rule for finding in record.findings] == ["uniform_scale"]
    assert record.metrics["scale_factor"] == pytest.approx(2)


@pytest.mark.parametrize("declares", ["fp8", "published"])
def test_format_noise_is_no_common_factor(bench, oracle, declares):
    record = check_accumulated("score", bench.layer(), bench.clean(declares), oracle, bench.declarations[declares])
    assert record.findings == []


def test_score_error_is_split_by_cause(bench, oracle):
    inputs, clean = bench.layer(), bench.clean("fp8")
    record = check_accumulated("score", inputs, clean, oracle, bench.declarations["fp8"])
    assert record.metrics["arithmetic_error"] < 1e-6 < record.metrics["format_error"]
    assert record.metrics["format_head_weight"] < 1e-6
    only_key = Trace("small", 2, "model", {**oracle.stages, "index_k": clean["index_k"]})
    exact = score_layer(inputs, *(only_key.value(s) for s in ("index_q", "index_k", "head_weight"))).float()
    record = check_accumulated("score", inputs, with_stage(only_key, score=exact), oracle, bench.declarations["fp8"])
    assert record.metrics["format_index_q"] == 0
    assert record.metrics["format_index_k"] > 1e-3


def test_attention_change_is_split_by_cause(bench, oracle):
    inputs = bench.layer()
    fewer = oracle.value("topk").clone()
    fewer[:, 8:] = -1
    path = Oracle()
    trace = Trace("small", 2, "model", {**oracle.stages, "topk": {"value": fewer}})
    trace.stages["attention"] = path.stage("attention", inputs, trace)
    record = check_accumulated("attention", inputs, trace, oracle, path.declares)
    assert record.metrics["selection_error"] == pytest.approx(record.metrics["relative_error"], rel=1e-4)
    assert record.metrics["format_error"] == 0
    trace = Trace("small", 2, "model", {**oracle.stages, "kv": bench.clean("fp8")["kv"]})
    trace.stages["attention"] = path.stage("attention", inputs, trace)
    record = check_accumulated("attention", inputs, trace, oracle, path.declares)
    assert record.metrics["selection_error"] == 0
    assert record.metrics["format_error"] == pytest.approx(record.metrics["relative_error"], rel=1e-4)


def test_eps_holds_what_formats_really_do(bench):
    """Scores of faultless paths stay within eps of the exact ones, and use more than a thirtieth of it."""
    for declares in ("bf16", "fp8", "published"):
        inputs = bench.inputs(seed=11, lengths=(1500,))
        truth = Oracle().run(inputs, "small", upto="score")
        path = bench.model(bench.declarations[declares])
        got = path.run(inputs, "small", upto="score").value("score").double()
        most = 0.0
        for row in inputs.visible.nonzero().flatten().tolist():
            entries = torch.arange(int(inputs.visible[row]))
            width = epsilon(inputs, torch.tensor([row]), entries[None], truth, path.declares).total[0]
            most = max(
                most,
                float(((got[row, : len(entries)] - truth.value("score")[row, : len(entries)]).abs() / width).max()),
            )
        assert 1 / 30 < most <= 1, (declares, most)


def test_eps_without_rounding_is_arithmetic_alone(bench, oracle):
    declares = Declaration(pool="fp64", score="fp64")
    exact = epsilon(bench.layer(), torch.tensor([0]), torch.arange(3)[None], oracle, declares)
    assert bool((exact.format == 0).all())
    assert bool((exact.arithmetic > 0).all())
    assert bool((exact.arithmetic < 1e-5).all())


@pytest.mark.parametrize("declares", ["fp32", "bf16", "fp8", "published"])
def test_eps_of_a_row_does_not_depend_on_the_rows_beside_it(bench, oracle, declares):
    inputs, path = bench.layer(), bench.declarations[declares]
    rows = inputs.visible.nonzero()[:, 0]
    assert len(inputs.row_request[rows].unique()) > 1
    entries = torch.arange(7) * inputs.visible[rows, None] // 7
    together = epsilon(inputs, rows, entries, oracle, path)
    for place, row in enumerate(rows.split(1)):
        alone = epsilon(inputs, row, entries[place : place + 1], oracle, path)
        assert alone.format[0].tolist() == pytest.approx(together.format[place].tolist(), rel=1e-12)
        assert alone.arithmetic[0].tolist() == pytest.approx(together.arithmetic[place].tolist(), rel=1e-12)


@pytest.mark.parametrize("row_bytes", [1, 2**14])
def test_record_does_not_depend_on_how_many_rows_are_looked_at_together(bench, oracle, monkeypatch, row_bytes):
    """A broken selection, so that rows differ in the number of swapped entries and the worst is a finding."""
    inputs, score = bench.layer(), oracle.value("score")
    chosen = bench.clean("fp8").value("topk").clone()
    row = int((inputs.visible > 16).nonzero()[-1])
    chosen[row] = score[row, : int(inputs.visible[row])].topk(16, largest=False).indices
    broken = with_stage(oracle, topk=chosen)
    whole = check_accumulated("topk", inputs, broken, oracle, bench.declarations["fp8"])
    for module in (accumulated_topk, accumulated_attention):
        monkeypatch.setitem(module.CHUNK_BYTES, "cpu", row_bytes)
    parts = check_accumulated("topk", inputs, broken, oracle, bench.declarations["fp8"])
    assert whole.findings[0].where["row"] == row
    assert [finding.where for finding in parts.findings] == [finding.where for finding in whole.findings]
    assert parts.metrics == pytest.approx(whole.metrics, rel=1e-12)
    assert parts.facts == whole.facts


def test_lost_mass_is_that_of_each_row_by_itself(bench, oracle):
    inputs, chosen = bench.layer(), oracle.value("topk").clone()
    chosen[::2, :5] = -1
    found = check_accumulated("topk", inputs, with_stage(oracle, topk=chosen), oracle, Oracle.declares).metrics
    lost = []
    for row, first in enumerate(packed_selection(inputs, oracle.value("topk"))[:, :5]):
        values = oracle["kv"]["compressed"][first[first >= 0]].double()
        table = rope_table(inputs.config, inputs.kind, inputs.row_position[row])
        query = attn_query(inputs.attn_query[row], inputs.config.rms_norm_eps, table)
        whole = torch.logaddexp(oracle["attention"]["lse"][row].double(), inputs.attn_sink.double())
        mass = (query @ values.T * inputs.config.softmax_scale - whole[:, None]).exp().sum(1)
        lost.append(mass * (row % 2 == 0))
    assert found["lost_mass_mean"] == pytest.approx(float(torch.stack(lost).mean()), rel=1e-5)
    assert found["lost_mass_most"] == pytest.approx(float(torch.stack(lost).max()), rel=1e-5)


def test_worst_swap_is_the_first_of_equals(bench, oracle):
    """Swaps among equal scores are free and all alike: of two rows with some, the first and its lowest entry is named,
    not the rows before it without any."""
    inputs, wanted = bench.layer(), oracle.value("topk").clone()
    rows = (inputs.visible > 20).nonzero()[1:3, 0]
    wanted[:] = torch.arange(16)
    chosen = wanted.clone()
    chosen[rows, 14:] = torch.tensor([19, 18], dtype=chosen.dtype)
    truth = with_stage(oracle, score=torch.ones_like(oracle.value("score")), topk=wanted)
    record = check_accumulated("topk", inputs, with_stage(oracle, topk=chosen), truth, bench.declarations["bf16"])
    assert record.metrics["swapped"] == 2 * 4
    assert record.metrics["swap_excess"] == 0
    assert record.worst is not None and record.worst.where == {"row": int(rows[0]), "entry": 14}


def test_unexercised_selection_is_skipped(bench):
    inputs = bench.inputs(lengths=(60,))
    trace = Oracle().run(inputs, "small")
    record = check_accumulated("topk", inputs, trace, trace, Oracle.declares)
    assert record.skipped == "selection not exercised"


def test_not_finite_tensors_are_named(bench, oracle):
    score = oracle.value("score").clone()
    score[3, 1] = torch.nan
    record = check_accumulated("score", bench.layer(), with_stage(oracle, score=score), oracle, Oracle.declares)
    assert record.skipped.startswith("nan at model score.value[3, 1]")


def test_other_shapes_are_named(bench, oracle):
    inputs: LayerInputs = bench.layer()
    short = with_stage(oracle, index_k=oracle.value("index_k")[:5])
    record = check_accumulated("index_k", inputs, short, oracle, Oracle.declares)
    assert "has index_k.value [5, 128]" in record.skipped


def test_change():
    one, two = torch.tensor([[3.0, 4.0]]), torch.tensor([[3.0, 3.0]])
    relative, largest, factor = change(one, two)
    assert (relative, largest, factor) == (pytest.approx(18**-0.5), 1.0, pytest.approx(21 / 18))
    assert change(torch.zeros(0, 2), torch.zeros(0, 2)) == (0.0, 0.0, 1.0)


def test_swa_layer_has_no_selection(bench):
    inputs = bench.layer("swa")
    trace = Oracle().run(inputs, "small")
    record = check_accumulated("attention", replace(inputs), trace, trace, Oracle.declares)
    assert record.metrics["selection_error"] == 0
