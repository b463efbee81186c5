import json

import pytest

from difftest.record import Finding, Record, Worst
from difftest.run_dir import RunDir

STAGES = ("compressed", "index_k", "index_q", "head_weight", "score", "topk", "kv", "attention")
CASES = {"needle-5294": {"lengths": [5294, 3611], "base_seed": 0}, "gaussian-2117": {"lengths": [2117], "base_seed": 0}}


def isolated(case, layer, path, stage, excess=0.25, **rest):
    worst = Worst({"row": 3, "entry": 70}, 1.5, 1.25, 0.001)
    facts = {"seconds": 0.001, "peak_bytes": 1 << 20}
    return Record(
        case,
        layer,
        "csa",
        path,
        stage,
        "isolated",
        "exact stage",
        {"excess": excess},
        {"excess": 1.0},
        worst=worst,
        facts=facts,
        **rest,
    )


def picks(case, layer, path, recall=0.99, **rest):
    place = {
        "row": 4,
        "request": 0,
        "position": 5293,
        "visible": 1323,
        "k": 4,
        "recall": recall,
        "swapped": 1,
        "cut": 0.5,
    }
    scores = {"want": [0.7, 0.5, 0.4, 0.3], "got": [0.7, 0.4, 0.6, 0.3]}
    cut = {**place, **scores, "rank": [3, 4, 5, 6], "entry": [70, 9, 1000, 8], "mine": "1010"}
    facts = {"gaps": [0.1, 2.0, "inf"], "cuts": [cut], "needles": [[1323, 0.5, 1], [1300, 0.1, 0]]}
    metrics = {"recall": recall, "recall_worst": recall - 0.05, "value_recall": 0.999, "lost_mass_mean": 0.0}
    return Record(case, layer, "csa", path, "topk", "accumulated", "oracle", metrics, facts=facts, **rest)


def records(bug=False):
    made = []
    for path in ("oracle", "bf16-k"):
        for case in CASES:
            for layer in (2, 14):
                made += [isolated(case, layer, path, stage) for stage in STAGES]
                made.append(picks(case, layer, path))
    if bug:
        made[9 * 6 + 1] = isolated("gaussian-2117", 2, "bf16-k", "index_k", excess=1234.0)
        hostile = Finding("range", "entry 9 of <script>alert(1)</script> is past </script> visible 8", {"row": 3})
        made[9 * 5 + 5] = isolated("needle-5294", 14, "bf16-k", "topk", findings=[hostile])
    return made


@pytest.fixture
def run_dir(tmp_path):
    """Makes a run directory of two paths, two cases and two layers, green or with two bugs."""

    def make(name="run", bug=False, found=None, **facts):
        run = RunDir.create(
            tmp_path / name,
            environment={"torch": "2.13.0", "gpu": ""},
            cases=CASES,
            paths=["oracle", "bf16-k"],
            **facts,
        )
        run.append(records(bug) if found is None else found)
        run.write_manifest(status="complete")
        return run.path

    return make


@pytest.fixture
def baseline(tmp_path):
    """A comparison with a base, as `difftest baseline compare --out` leaves it."""
    key = {
        "case": "needle-5294",
        "layer": 2,
        "path": "bf16-k",
        "stage": "topk",
        "comparison": "accumulated",
        "metric": "recall",
    }
    row = {"key": key, "base": 0.99, "head": 0.95, "mean": -0.04, "adjusted": 0.001, "answer": "worse"}
    made = {"sentence": "worse than the base: recall", "exit_code": 1, "rows": [row], "comparison": {}}
    folder = tmp_path / "compared"
    folder.mkdir()
    (folder / "baseline-result.json").write_text(json.dumps(made))
    return folder
