"""The written conclusion of a sweep, computed from its cells: what produces a cliff near 4.5k and what does not."""

from collections.abc import Sequence

from .curves import CLIFF_SHAPES, Curve, Shape, wilson
from .sweep_cell import Cell

FP8_ALONE = ("sglang-fp8", "fp8 q and K", "sglang-fp8-model", "fp8 K only")
"""Variants whose only deviation from the published indexer is fp8; the first that was swept speaks for it."""

ORDER: tuple[tuple[Shape, str], ...] = (
    ("cliff near 4.5k", "A cliff near 4.5k"),
    ("cliff elsewhere", "A cliff elsewhere"),
    ("loss without choice", "A loss even where every entry may be selected"),
    ("loss, no cliff", "A loss without a cliff"),
    ("rare loss", "A rare loss, recall at least 0.9 at every length"),
    ("no loss", "No loss at all"),
    ("not exercised", "Cannot judge: every row may select all it sees"),
    ("crashed", "Cannot judge: it raised"),
)


def conclusion(found: Sequence[Curve], cells: Sequence[Cell]) -> list[str]:
    """Paragraphs of Markdown: what was swept, one list a distractor model, the answer about fp8, how to read it."""
    if not found:
        return ["Nothing was swept."]
    lines = [_scope(cells)]
    for distractor in dict.fromkeys(curve.distractor for curve in found):
        for k in sorted({curve.k for curve in found if curve.distractor == distractor}):
            lines += _of_distractor(distractor, k, [c for c in found if c.distractor == distractor and c.k == k])
    lines += about_fp8(found)
    lines += about_place(found)
    lines += about_margins(found, cells)
    return lines


def _scope(cells: Sequence[Cell]) -> str:
    lengths = sorted({cell.length for cell in cells})
    counts = [
        (len(cells), "needle"),
        (len({cell.variant for cell in cells}), "variant"),
        (len(lengths), "length"),
        (len({cell.depth for cell in cells}), "depth"),
        (len({cell.layer for cell in cells}), "layer"),
        (len({cell.seed for cell in cells}), "seed"),
    ]
    said = ", ".join(f"{count:,} {what}{'s' * (count != 1)}" for count, what in counts)
    return f"{said}; {lengths[0]:,} to {lengths[-1]:,} tokens."


def _of_distractor(distractor: str, k: int, found: Sequence[Curve]) -> list[str]:
    lines = [f"**{distractor}, index_topk {k}**"]
    for shape, title in ORDER:
        of_shape = [curve for curve in found if curve.shape == shape]
        if of_shape:
            lines.append(f"- {title}: " + "; ".join(describe(curve) for curve in of_shape) + ".")
    return lines


def describe(curve: Curve) -> str:
    """A variant with the numbers behind its verdict."""
    if curve.error:
        return f"{curve.variant} ({curve.error})"
    if not curve.exercised:
        return curve.variant
    if curve.shape == "no loss":
        return f"{curve.variant} ({curve.total} of {curve.total})"
    last = curve.exercised[-1]
    parts = []
    if curve.half is not None and curve.onset is not None:
        parts.append(f"a tenth lost at {round_length(curve.onset)}, half at {round_length(curve.half)}")
    parts.append(f"recall {last.recall:.2f} at {last.length:,}")
    lowest = min(curve.exercised, key=lambda point: point.recall)
    if curve.shape == "loss, no cliff" and lowest.recall < last.recall:
        parts.append(f"lowest {lowest.recall:.2f} at {lowest.length:,}")
    if curve.at_chance:
        parts.append("no better than chance")
    if curve.shape == "rare loss":
        parts = [f"{curve.lost} of {curve.total} lost"]
    if curve.margin_lost is not None and curve.group == "path":
        parts.append(f"margins of the lost up to {curve.margin_lost:.2g} of the bound")
    return f"{curve.variant} ({', '.join(parts)})"


def round_length(length: float) -> str:
    """A length as people say it: 4.1k, 512."""
    return f"{length / 1000:.1f}k" if length >= 1000 else f"{length:.0f}"


def about_fp8(found: Sequence[Curve]) -> list[str]:
    """The answer to the question the sweep was made for, from the curves of the first fp8 variant that was swept."""
    name = next((name for name in FP8_ALONE if any(curve.variant == name for curve in found)), None)
    if name is None:
        return ["**fp8 alone**: not swept; add a path or `--ablation formats`."]
    mine = [curve for curve in found if curve.variant == name and curve.exercised]
    if not mine:
        return [f"**fp8 alone** ({name}): cannot be judged, no row had to choose."]
    cliffs = [curve for curve in mine if curve.shape == "cliff near 4.5k"]
    others = [curve for curve in mine if curve.shape == "cliff elsewhere"]
    lost, total = sum(curve.lost for curve in mine), sum(curve.total for curve in mine)
    low, high = wilson(lost, total)
    share = f"it loses {lost:,} of {total:,} needles ({lost / total:.2%}, 95 % interval {low:.2%} to {high:.2%})"
    if cliffs:
        return [f"**fp8 alone does produce a cliff near 4.5k** ({name}): {_where(cliffs)}; {share}."]
    where = [f"{c.distractor} with k {c.k} {c.lost} of {c.total}" for c in mine if c.lost]
    text = f"**fp8 alone does not produce a cliff near 4.5k** ({name}): {share}"
    text += f", all of them under {', '.join(where)}" if where else ""
    if others:
        text += f", and has a cliff elsewhere: {_where(others)}"
    without = [curve for curve in mine if curve.shape == "loss, no cliff"]
    if without:
        text += f". It does lose needles, without a cliff: {_where(without)}"
    unexplained = sum(curve.unexplained for curve in mine)
    if lost:
        text += f". {unexplained or 'None'} of the lost had a margin that its rounding cannot bridge"
    return [text + "."]


def _where(found: Sequence[Curve]) -> str:
    parts = []
    for curve in found:
        last = curve.exercised[-1]
        half = f", half lost at {round_length(curve.half)}" if curve.half is not None else ""
        parts.append(f"{curve.distractor} with k {curve.k} (recall {last.recall:.2f} at {last.length:,}{half})")
    return "; ".join(parts)


def about_place(found: Sequence[Curve]) -> list[str]:
    """Why a broken selection falls where it does: compares curves at chance with k entries picked at random."""
    lines = []
    for k in sorted({curve.k for curve in found}):
        fallen = [c for c in found if c.k == k and c.shape in CLIFF_SHAPES and c.at_chance]
        halves = sorted(curve.half for curve in fallen if curve.half)
        onsets = sorted(curve.onset for curve in fallen if curve.onset)
        if halves:
            first, middle = (round_length(ordered[len(ordered) // 2]) for ordered in (onsets, halves))
            lines.append(
                f"**Where a cliff lies is decided by index_topk.** With k {k}, {len(halves)} of the curves on a cliff "
                f"are no better than chance: a tenth of their needles is lost at {first}, half at {middle} (medians). "
                f"Picking {k} entries at random loses none up to {4 * k:,} tokens, where all are selected, and half at "
                f"{8 * k:,}."
            )
    return lines


def about_margins(found: Sequence[Curve], cells: Sequence[Cell]) -> list[str]:
    """Whether the paths' losses are explained by their declared formats, and what a lost needle costs."""
    paths = [curve for curve in found if curve.group == "path" and curve.exercised]
    lines = []
    if paths:
        guilty = sorted({curve.variant for curve in paths if curve.unexplained})
        lost = sum(curve.lost for curve in paths)
        if guilty:
            lines.append(
                f"**Not explained by number formats**: needles lost by {', '.join(guilty)} beyond their bounds."
            )
        elif lost:
            lines.append(f"All {lost:,} needles that the paths lost lay within their formats' error bounds of the cut.")
    return lines + _below(cells) + _cost(cells)


def _below(cells: Sequence[Cell]) -> list[str]:
    below = {(c.distractor, c.layer, c.seed, c.length, c.depth, c.k) for c in cells if c.below}
    if not below:
        return []
    return [f"{len(below)} needles are left out: the exact selection does not hold them either."]


def _cost(cells: Sequence[Cell]) -> list[str]:
    seen: dict[tuple[str, int, int, int, float, int], tuple[float, float]] = {}
    for cell in cells:
        if cell.result:
            where = (cell.distractor, cell.layer, cell.seed, cell.length, cell.depth, cell.k)
            seen[where] = (cell.result.mass, cell.result.loss)
    if not seen:
        return []
    mass, loss = (sum(part) / len(seen) for part in zip(*seen.values(), strict=True))
    return [
        f"A lost needle costs the heads that look for it {mass:.0%} of their attention mass, and moves the whole "
        f"attention output by {loss:.0%} of its norm (means)."
    ]
