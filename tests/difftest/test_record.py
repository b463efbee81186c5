import json
import math

import pytest

from difftest.record import Finding, Record, Worst, append_records, read_records


def record(**changes):
    facts = {
        "case": "needle-4509",
        "layer": 2,
        "kind": "csa",
        "path": "bf16-k",
        "stage": "score",
        "comparison": "isolated",
        "against": "exact stage",
        "metrics": {"excess": 0.25, "deviation": math.inf},
        "bounds": {"deviation": 1e-6},
        "findings": [Finding("range", "entry 9 of row 3 is past visible 8", {"row": 3})],
        "worst": Worst({"row": 3, "entry": 9}, math.nan, 1.0, 1e-6),
    }
    return Record(**{**facts, **changes})


def test_a_record_survives_its_own_json_including_nan_and_infinity():
    line = record().to_json()
    assert "\n" not in line
    json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    back = Record.from_json(line)
    assert back.metrics == record().metrics
    assert math.isnan(back.worst.got)
    assert back.findings == record().findings


def test_another_schema_is_refused():
    raw = json.loads(record().to_json())
    raw["schema"] = 99
    with pytest.raises(ValueError, match="schema is 99, this version reads 1"):
        Record.from_json(json.dumps(raw))


def test_a_torn_last_line_is_left_out(tmp_path):
    file = tmp_path / "records.jsonl"
    append_records(file, [record(), record(layer=4)])
    file.write_text(file.read_text() + record(layer=6).to_json()[:40])
    assert [found.layer for found in read_records(file)] == [2, 4]


def test_a_fault_in_the_middle_names_file_and_line(tmp_path):
    file = tmp_path / "records.jsonl"
    file.write_text(record().to_json() + "\n{}\n" + record().to_json() + "\n")
    with pytest.raises(ValueError, match=r"records\.jsonl:2 is not a difftest record"):
        list(read_records(file))


def test_a_foreign_line_is_named(tmp_path):
    file = tmp_path / "records.jsonl"
    file.write_text("[1, 2]\n" + record().to_json() + "\n")
    with pytest.raises(ValueError, match=r"records\.jsonl:1 .* schema is 'list'"):
        list(read_records(file))
