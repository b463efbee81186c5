"""Records and manifests that earlier versions wrote are read, judged and reported by this one."""

import shutil
from pathlib import Path

import pytest

from difftest.record import SCHEMA, read_records
from difftest.report.evidence import load
from difftest.report.junit import junit
from difftest.report.markdown import markdown
from difftest.verdict import judge, load_policy

DATA = Path(__file__).parent / "data"
SCHEMAS = sorted(int(file.stem.rpartition("-")[2]) for file in DATA.glob("records-schema-*.jsonl"))


@pytest.fixture
def old_run(tmp_path):
    def make(schema):
        shutil.copy(DATA / f"records-schema-{schema}.jsonl", tmp_path / "records.jsonl")
        shutil.copy(DATA / f"run-schema-{schema}.json", tmp_path / "run.json")
        return tmp_path

    return make


def test_every_schema_so_far_has_its_sample():
    assert list(range(1, SCHEMA + 1)) == SCHEMAS, "keep a sample of records whenever the schema changes"


@pytest.mark.parametrize("schema", SCHEMAS)
def test_old_records_are_read_and_judged_as_they_were(schema):
    records = list(read_records(DATA / f"records-schema-{schema}.jsonl"))
    mine = [record for record in records if record.case == "gaussian-2117"]
    assert [record.stage for record in mine if record.comparison == "isolated"][:3] == [
        "compressed",
        "index_k",
        "index_q",
    ]
    assert mine[1].metrics["codes_equal"] == 0.9999852315689981 and mine[1].bounds["excess"] == 1.0
    assert mine[1].worst.where == {"request": 0, "entry": 230, "block": 0}
    assert [verdict.answer for verdict in judge(mine, load_policy("default"))] == ["agrees"]


@pytest.mark.parametrize("schema", SCHEMAS)
def test_old_runs_are_reported(schema, old_run):
    evidence = load([old_run(schema)], "default")
    assert "gaussian-2117" in junit(evidence)
    assert "`sglang-fp8-model`" in markdown(evidence)
