import pytest

from difftest.scale.shards import Shard, bare, plan_digest, split, unit_of_id, unit_seconds

UNITS = [f"case{number}-layer2" for number in range(7)]


def test_neither_file_nor_group_is_part_of_an_id():
    assert bare("suite/test_stages.py::test_stage[a-layer2-p-score]@a-layer2") == "test_stage[a-layer2-p-score]"
    assert bare("test_stages.py::test_stage[sglang_fp8@recorded-kv]") == "test_stage[sglang_fp8@recorded-kv]"


def test_the_unit_of_an_id():
    assert (
        unit_of_id("x/test_stages.py::test_stage[rec-decode-2058-258-layer2-sglang_fp8_layer-kv]")
        == "rec-decode-2058-258-layer2"
    )
    assert unit_of_id("x/test_stages.py::test_other[a-layer2-p-kv]") == unit_of_id("x::test_stage") == ""


def test_a_units_seconds_are_the_sum_of_its_tests():
    tests = {"t[a1]": "a", "t[a2]": "a", "t[b]": "b"}
    assert unit_seconds(tests, {"t[a1]@a": 1.0, "t[a2]": 2.0, "other": 9.0}) == {"a": 3.0}


@pytest.mark.parametrize("algorithm", ["least_duration", "duration_based_chunks"])
def test_every_unit_is_in_exactly_one_shard(algorithm):
    pytest.importorskip("pytest_split", reason="pytest-split is not installed: pip install 'difftest[ci]'")
    durations = {unit: float(number + 1) for number, unit in enumerate(UNITS)}
    shards = split(UNITS, durations, 3, algorithm)
    assert sorted(unit for shard in shards for unit in shard) == UNITS
    loads = [sum(durations[unit] for unit in shard) for shard in shards]
    assert max(loads) - min(loads) <= max(durations.values())


def test_a_plan_is_the_set_of_its_units():
    assert plan_digest(UNITS) == plan_digest([*reversed(UNITS), UNITS[0]])
    assert plan_digest(UNITS) != plan_digest(UNITS[1:])
    shard = Shard(1, 2, plan_digest(UNITS), UNITS[:3], len(UNITS))
    assert Shard.from_json(shard.to_json()) == shard
