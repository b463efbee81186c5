"""matplotlib figures as inline SVG that follows the page's colours, light or dark."""

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

INK, FAINT, WARN = "#0a0a0b", "#0a0a0c", "#0a0a0d"
"""Stand-ins that matplotlib draws with and that the page's own variables then replace."""
SERIES = tuple(f"#0b0b{number:02x}" for number in range(8))
MARKERS = ("o", "s", "D", "^", "v", "P", "X", "*")
LINES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)), "-")
VARIABLES = {INK: "var(--ink)", FAINT: "var(--faint)", WARN: "var(--bad)"} | {
    colour: f"var(--series-{number})" for number, colour in enumerate(SERIES)
}
INSTALL = 'pip install "difftest[report]"'
WIDTH, HEIGHT = 5.4, 2.7
"""Inches, without the legend. Narrow, so that 9 point text is still readable when the figure is as wide as a phone."""
LEFT, BOTTOM, RIGHT = 0.65, 0.5, 0.12
LEGEND_PAD, LEGEND_LINE = 0.2, 0.17
"""Inches around the axes; the legend is above them."""


class NoPlots(Exception):
    """matplotlib or jinja2 cannot be imported; the message says how to install them."""


def matplotlib_figure() -> Any:
    """matplotlib's Figure class, without pyplot and its state. NoPlots if it is not installed."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise NoPlots(f"the HTML report needs matplotlib: {INSTALL}") from error
    matplotlib.rcParams.update(
        {
            "svg.fonttype": "none",
            "font.family": "sans-serif",
            "font.size": 9,
            "text.color": INK,
            "axes.edgecolor": FAINT,
            "axes.labelcolor": INK,
            "axes.facecolor": "none",
            "axes.spines.top": False,
            "axes.spines.right": False,
            "xtick.color": INK,
            "ytick.color": INK,
            "grid.color": FAINT,
            "grid.alpha": 0.4,
            "legend.frameon": False,
            "legend.fontsize": 8,
            "path.simplify": True,
        }
    )
    return Figure


@contextmanager
def axes(
    name: str, entries: int, height: float = HEIGHT, left: float = LEFT, bottom: float = BOTTOM
) -> Iterator[tuple[Any, "Drawing"]]:
    """An empty axis and the drawing that becomes SVG on leaving. `name` makes the ids in it unique on the page.

    Margins are fixed, in inches: laying out a figure by itself takes as long as drawing it. The figure grows by the
    room that a legend of `entries` in two columns takes.
    """
    legend = LEGEND_PAD + LEGEND_LINE * -(-entries // 2)
    height += legend
    figure = matplotlib_figure()(figsize=(WIDTH, height))
    figure.subplots_adjust(left / WIDTH, bottom / height, 1 - RIGHT / WIDTH, 1 - legend / height)
    drawing = Drawing()
    yield figure.subplots(), drawing
    drawing.svg = _text(figure, name)


class Drawing:
    """Holds the SVG text of a figure once it is done."""

    svg: str = ""


def _text(figure: Any, name: str) -> str:
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    text = re.sub(
        r'id="(figure|axes|patch|line2d|text|legend|matplotlib\.axis|xtick|ytick|PathCollection)_(\w+)"', "", text
    )
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, variable)
    return text.strip()
