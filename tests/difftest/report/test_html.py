import json
import re
import time
from html.parser import HTMLParser

import pytest

from difftest.record import Record, append_records
from difftest.report.evidence import load

from .conftest import STAGES, isolated, picks

pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'difftest[report]'")
pytest.importorskip("jinja2", reason="jinja2 is not installed: pip install 'difftest[report]'")
from difftest.report.html import html

RECORDS, SECONDS, BYTES = 20_000, 3.0, 5_000_000


class Page(HTMLParser):
    """Ids, links and sources of a page."""

    def __init__(self, text):
        super().__init__()
        self.ids, self.targets, self.sources = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        if "id" in found:
            self.ids.append(found["id"])
        if tag == "a":
            self.targets.append(found["href"])
        self.sources += [found[name] for name in ("src", "srcset", "data") if name in found]
        if tag == "link":
            self.sources.append(found["href"])


def test_every_section_is_there_and_every_link_leads_somewhere(run_dir, baseline):
    text = html(load([run_dir(), baseline], "default"))
    page = Page(text)
    for section in (
        "verdicts",
        "layers",
        "recall",
        "gaps",
        "scatter",
        "worst",
        "times",
        "memory",
        "needles",
        "baseline",
        "environment",
    ):
        assert section in page.ids
    assert len(page.ids) == len(set(page.ids)), "ids are unique, those inside the drawings too"
    assert {target.removeprefix("#") for target in page.targets} <= set(page.ids)
    assert "✗</span> DISAGREES</h1>" in text, "the base branch was better"


def test_nothing_is_loaded_from_anywhere(run_dir):
    text = html(load([run_dir(bug=True)], "default"))
    assert [source for source in Page(text).sources if not source.startswith("data:")] == []
    outside = re.sub(r'xmlns(:\w+)?="[^"]*"', "", text)
    assert "http" not in outside and "@import" not in text and "url(http" not in text


def test_records_cannot_write_into_the_page(run_dir):
    text = html(load([run_dir(bug=True)], "default"))
    assert "<script>alert" not in text
    assert text.count("</script>") == 2
    details = json.loads(re.search(r'id="details">(.*?)</script>', text, re.S)[1])
    assert any("<script>alert(1)</script>" in row[-1] for row in details[1]["14/topk"])


def test_the_drawings_follow_the_pages_colours(run_dir):
    text = html(load([run_dir()], "default"))
    assert "var(--series-0)" in text and "var(--ink)" in text
    drawings = re.findall(r"<svg.*?</svg>", text, re.S)
    assert len(drawings) >= 6
    assert not [drawing for drawing in drawings if "#0a0a0" in drawing or "#0b0b" in drawing], "stand-ins are replaced"


def test_state_is_never_colour_alone(run_dir):
    text = html(load([run_dir(bug=True)], "default"))
    buttons = re.findall(r'<button type="button" class="(\w+) s\d" data-key="([^"]*)" aria-label="([^"]*)">(.)', text)
    assert {(kind, mark) for kind, _, _, mark in buttons} == {("ok", "✓"), ("bug", "✗")}
    assert all("bound" in words for _, _, words, _ in buttons)


def test_nan_is_outside_every_bound(run_dir):
    made = [isolated("gaussian-2117", 2, "bf16-k", stage) for stage in STAGES]
    made[3] = isolated("gaussian-2117", 2, "bf16-k", "head_weight", excess=float("nan"))
    text = html(load([run_dir(found=made)], "default"))
    assert "layer 2 head_weight: outside its bound ∞" in text


def test_old_records_without_what_is_drawn_still_make_a_page(run_dir):
    plain = [isolated("gaussian-2117", 2, "bf16-k", stage) for stage in STAGES]
    old = Record(
        "gaussian-2117", 2, "csa", "bf16-k", "topk", "accumulated", "oracle", {"recall": 0.9, "gap_median": 0.3}
    )
    text = html(load([run_dir(found=[*plain, old])], "default"))
    assert 'id="gaps"' in text and 'id="worst"' not in text


def test_sweeps_live_recall_and_bench_are_drawn(tmp_path, run_dir):
    from difftest.recall.sweep_cell import SCHEMA, Cell, Score

    def cell(length, depth, selected):
        result = Score(selected, 3, 1.5, 4.0, 0.1, 0.05, 0.2, 0.1)
        return Cell("none", 2, 0, "bf16-k", "path", 512, length, depth, 7, length // 4, result)

    cells = [cell(length, depth, length < 9000) for length in (4096, 16384) for depth in (0.1, 0.9)]
    settings = json.dumps({"kind": "settings", "schema": SCHEMA, "settings": {"seed": 0}})
    (tmp_path / "sweep.jsonl").write_text("\n".join([settings, *(one.to_json() for one in cells)]) + "\n")
    row = {
        "kernel": "score",
        "format": "bf16",
        "shape": "64 x 16384",
        "us": 12.5,
        "share_of_ceiling": 0.83,
        "ratio_to_fp8": 1.1,
    }
    (tmp_path / "bench.json").write_text(json.dumps({"ceilings": {}, "rows": [row]}))
    text = html(load([run_dir(), tmp_path], "default"))
    for part in (
        "Needles against length",
        "sweep, bf16-k, k 512, none",
        "✗ 0/1",
        "Kernels against the ceiling",
        "83.0%",
    ):
        assert part in text, part


def test_an_empty_run_says_that_nothing_was_judged(run_dir):
    text = html(load([run_dir(found=[])], "default"))
    assert "CANNOT JUDGE" in text and "nothing was compared" in text


def test_twenty_thousand_records_are_quick_and_small(run_dir):
    folder = run_dir(found=[])
    made = []
    for number in range(RECORDS // 9 + 1):
        path, layer, case = f"path-{number % 5}", number % 61, f"case-{number % 40}-{number // 200}"
        made += [isolated(case, layer, path, stage) for stage in STAGES] + [picks(case, layer, path)]
    append_records(folder / "records.jsonl", made[:RECORDS])
    started = time.process_time()
    text = html(load([folder], "default"))
    assert time.process_time() - started <= SECONDS, "processor time, so that a busy machine does not fail this"
    assert len(text.encode()) <= BYTES
