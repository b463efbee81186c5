"""The report as a browser shows it. Needs Chromium (CHROMIUM, or on PATH) and playwright: `make test-browser`."""

import os
import shutil

import pytest

from difftest.report.evidence import load

sync_api = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed: pip install 'difftest[browser]'"
)
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
QUIET = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not CHROMIUM, reason="no Chromium here: set CHROMIUM to its path"),
]
PHONE, DESK = {"width": 360, "height": 740}, {"width": 1280, "height": 900}


@pytest.fixture(scope="module")
def chromium():
    with sync_api.sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=CHROMIUM, args=list(QUIET))


@pytest.fixture
def open_page(chromium, run_dir, tmp_path):
    """Opens the report of a run and collects what the page complains about or asks the network for."""
    pages = []

    def show(bug=False, viewport=DESK, scheme="light"):
        from difftest.report.html import html

        file = tmp_path / f"{len(pages)}.html"
        file.write_text(html(load([run_dir(f"run{len(pages)}", bug=bug)], "default")))
        page = chromium.new_context(viewport=viewport, color_scheme=scheme).new_page()
        page.complaints = []
        page.on("console", lambda message: page.complaints.append(message.text))
        page.on("pageerror", lambda error: page.complaints.append(str(error)))
        page.on(
            "request", lambda request: request.url.startswith(("file:", "data:")) or page.complaints.append(request.url)
        )
        page.goto(file.as_uri())
        pages.append(page)
        return page

    yield show
    for page in pages:
        assert page.complaints == []
        page.close()


def luminance(page, selector, what):
    """Relative luminance (WCAG 2) of a computed colour."""
    text = page.eval_on_selector(selector, f"element => getComputedStyle(element)['{what}']")
    channels = [float(part) / 255 for part in text[text.index("(") + 1 : -1].split(",")[:3]]
    linear = [value / 12.92 if value <= 0.03928 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast_in_both_schemes(open_page, scheme):
    page = open_page(scheme=scheme)
    paper = luminance(page, "body", "backgroundColor")
    assert (paper > 0.5) == (scheme == "light")
    for selector in ("body", "h1", "figcaption", "nav a", ".badge", "#recall svg text"):
        ink = luminance(page, selector, "fill" if "svg" in selector else "color")
        assert (max(ink, paper) + 0.05) / (min(ink, paper) + 0.05) >= 4.5, f"{selector}, {scheme}"


def test_the_verdict_is_what_one_sees_first(open_page):
    page = open_page(bug=True)
    assert page.locator("h1").inner_text().endswith("DISAGREES")
    assert page.locator("h1").bounding_box()["y"] < DESK["height"] / 4
    assert "difftest run --case gaussian-2117 --layer 2 --path bf16-k" in page.locator("header code").inner_text()


def test_a_phone_never_scrolls_sideways(open_page):
    page = open_page(bug=True, viewport=PHONE, scheme="dark")
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]


def test_a_cell_opens_by_click(open_page):
    page = open_page(bug=True)
    page.locator("details[open] button.bug").first.click()
    panel = page.locator("details[open] .panel")
    assert "Layer 2, index_k: outside its bound" in panel.inner_text()
    assert "got 1.5, exact 1.25, bound 0.001" in panel.inner_text()
    assert panel.locator("tbody tr").first.locator("td").all_inner_texts()[:4] == [
        "gaussian-2117",
        "excess",
        "1234",
        "1",
    ]


def test_everything_works_from_the_keyboard(open_page):
    page = open_page()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    page.locator("details[open] table.heat button").first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement.dataset.key") == "14/index_k"
    page.keyboard.press("Enter")
    assert "Layer 14, index_k: within its bound" in page.locator("details[open] .panel").inner_text()
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_hostile_text_stays_text(open_page):
    page = open_page(bug=True)
    page.locator("details[open] button[data-key='14/topk']").click()
    assert "<script>alert(1)</script>" in page.locator("details[open] .panel").inner_text()
