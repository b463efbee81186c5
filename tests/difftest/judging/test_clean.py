"""A faultless path raises no alarm, whatever it declares and whatever the seed."""

import pytest

from difftest.policy import load_policy
from difftest.verdict import failure, judge

POLICY = load_policy("default")


@pytest.mark.parametrize("declares", ["fp32", "fp8", "published", "bf16"])
@pytest.mark.parametrize("kind", ["swa", "csa", "hca"])
def test_every_stage_is_within_its_bounds(bench, declares, kind):
    for seed in range(8):
        lengths = (271, 183) if kind != "hca" else (700, 391)
        for record in bench.records(bench.inputs(kind, seed, lengths), declares):
            assert failure(record, POLICY) is None, (seed, record)
            assert not record.skipped


@pytest.mark.parametrize("declares", ["fp32", "bf16"])
def test_arithmetic_uses_little_of_its_bound(bench, declares):
    """A bound that clean fp32 arithmetic does not come near could not see a fault of its own size either; one that it
    fills to the brim would raise alarms. Ambiguous roundings fill theirs by design, so only plain stages are looked at.
    """
    records = {record.stage: record for record in bench.records(bench.layer(), declares)}
    for stage in ("compressed", "head_weight", "score"):
        assert 1e-4 < records[stage].metrics["excess"] < 0.6, (stage, records[stage].metrics)


def test_verdict_of_a_clean_path_is_agrees(bench):
    (verdict,) = judge(bench.records(bench.layer(), "fp8"), POLICY)
    assert (verdict.answer, verdict.stage, verdict.exit_code) == ("agrees", None, 0)
