"""Rules for a selection: structure, exactness on the path's own scores, recall, and what the cut looks like."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .record import Finding
from .text import apart


@dataclass(frozen=True)
class Selection:
    """A selection and the scores it was made from.

    chosen [R, k] int (request-relative, -1 padded), score [R, E] float (-inf or anything past `visible`), visible [R].
    """

    chosen: Tensor
    score: Tensor
    visible: Tensor

    @property
    def k(self) -> int:
        return int(self.chosen.shape[1])

    @property
    def exercised(self) -> Tensor:
        """Rows that had to choose, bool [R]: more visible entries than k."""
        return self.visible > self.k

    def mask(self) -> Tensor:
        """Selected entries as a mask, bool [R, E]; indices outside [0, E) are left out."""
        return as_mask(self.chosen, self.score.shape[1])


def as_mask(chosen: Tensor, width: int) -> Tensor:
    """Index rows [R, k] as a mask [R, width]; indices outside [0, width) are left out."""
    inside = (chosen >= 0) & (chosen < width)
    mask = torch.zeros(len(chosen), width + 1, dtype=torch.bool, device=chosen.device)
    return mask.scatter_(1, torch.where(inside, chosen, width).long(), True)[:, :width]


def structure(selection: Selection, slots: Tensor | None = None, pool_slots: Tensor | None = None) -> list[Finding]:
    """The structural rules (contract K7), each its own finding: range, unique, count, nan, padding, and slots.

    slots [R, k]: the pool slots the path returned for the same entries; pool_slots [R, E]: the slot of every entry.
    """
    chosen, visible = selection.chosen.long(), selection.visible
    given = chosen >= 0
    rules = [
        ("range", (chosen < -1) | (chosen >= visible[:, None]), "is outside the row's visible entries"),
        ("unique", _repeated(chosen), "is selected more than once"),
        ("padding", ~given & _later(given), "stands before a selected entry: padding belongs at the end"),
        ("nan_selected", _selected_nan(selection), "is selected, and its score is NaN"),
    ]
    if slots is not None and pool_slots is not None:
        wanted = pool_slots.gather(1, chosen.clamp(0, max(0, pool_slots.shape[1] - 1)))
        inside = given & (chosen < visible[:, None])
        rules.append(
            ("slots", inside & (slots.long() != wanted), "is given another pool slot than its page table says")
        )
    findings = [_first(name, bad, chosen, says) for name, bad, says in rules if bool(bad.any())]
    wanted_count = visible.clamp(max=selection.k)
    bad_count = given.sum(1) != wanted_count
    if bool(bad_count.any()):
        row = int(bad_count.nonzero()[0])
        message = (
            f"row {row} selects {int(given[row].sum())} entries and should select {int(wanted_count[row])} "
            f"({int(visible[row])} visible, k = {selection.k}); {int(bad_count.sum())} such rows"
        )
        findings.append(Finding("count", message, {"row": row}))
    return findings


def _first(rule: str, bad: Tensor, chosen: Tensor, says: str) -> Finding:
    row, slot = (int(part) for part in bad.nonzero()[0])
    entry = int(chosen[row, slot])
    rest = f"; {int(bad.sum())} such in {int(bad.any(1).sum())} rows"
    return Finding(rule, f"row {row}, place {slot}: {entry} {says}{rest}", {"row": row, "place": slot, "entry": entry})


def _repeated(chosen: Tensor) -> Tensor:
    """Places that repeat an entry an earlier place of the row holds."""
    order = chosen.argsort(dim=1, stable=True)
    ranked = chosen.gather(1, order)
    again = torch.zeros_like(chosen, dtype=torch.bool)
    again[:, 1:] = (ranked[:, 1:] == ranked[:, :-1]) & (ranked[:, 1:] >= 0)
    return torch.zeros_like(again).scatter(1, order, again)


def _later(given: Tensor) -> Tensor:
    """Places after which the row still has a selected entry."""
    return given.flip(1).cummax(1).values.flip(1) if given.shape[1] else given


def _selected_nan(selection: Selection) -> Tensor:
    chosen, width = selection.chosen.long(), selection.score.shape[1]
    if not width:
        return torch.zeros_like(chosen, dtype=torch.bool)
    score = selection.score.gather(1, chosen.clamp(0, width - 1))
    return score.isnan() & (chosen >= 0) & (chosen < width)


@dataclass(frozen=True)
class Exactness:
    """Rows with an unselected score above a selected one, and the clearest such row."""

    wrong_rows: Tensor
    largest_gap: float
    findings: list[Finding]


def exactness(selection: Selection) -> Exactness:
    """No unselected visible score lies above a selected one, exactly; ties at the cut are free; NaN ranks below all."""
    width = selection.score.shape[1]
    picked = selection.mask()
    shown = torch.arange(width, device=picked.device) < selection.visible[:, None]
    score = selection.score.double().masked_fill(selection.score.isnan(), -torch.inf)
    left = score.masked_fill(picked | ~shown, -torch.inf)
    kept = score.masked_fill(~(picked & shown), torch.inf)
    if not width:
        nothing = torch.zeros(len(picked), dtype=torch.bool, device=picked.device)
        return Exactness(nothing, 0.0, [])
    best, worst = left.amax(1), kept.amin(1)
    wrong = best > worst
    if not bool(wrong.any()):
        return Exactness(wrong, 0.0, [])
    gap = (best - worst).nan_to_num(posinf=torch.inf).masked_fill(~wrong, -torch.inf)
    row = int(gap.argmax())
    out, in_ = int(left[row].argmax()), int(kept[row].argmin())
    high, low = apart(float(best[row]), float(worst[row]))
    message = (
        f"row {row} leaves out entry {out} with score {high} and selects entry {in_} with {low}; "
        f"{int(wrong.sum())} of {len(wrong)} rows are not the top {selection.k} of their own scores"
    )
    return Exactness(wrong, float(gap[row]), [Finding("order", message, {"row": row, "entry": out, "selected": in_})])


def recall(chosen: Tensor, wanted: Tensor, width: int) -> Tensor:
    """Share of `wanted` [R, k] that `chosen` [R, k] holds, by row, fp64; sets, order free. 1 for a row that wants
    none."""
    want = as_mask(wanted, width)
    both = (as_mask(chosen, width) & want).sum(1).double()
    return torch.where(want.any(1), both / want.sum(1).clamp(min=1), 1.0)


def value_recall(chosen: Tensor, score: Tensor, visible: Tensor) -> Tensor:
    """Share of a row's selected entries whose score (the baseline's) reaches its k-th best: recall in which ties at the
    cut count as hits. score [R, E], by row, fp64."""
    cut = kth_score(score, visible, chosen.shape[1])
    hits = (as_mask(chosen, score.shape[1]) & (score.double() >= cut[:, None])).sum(1).double()
    wanted = visible.clamp(max=chosen.shape[1])
    return torch.where(wanted > 0, hits / wanted.clamp(min=1), 1.0)


def kth_score(score: Tensor, visible: Tensor, k: int) -> Tensor:
    """The k-th best visible score of each row, fp64 [R]; -inf for a row with fewer than k."""
    width = score.shape[1]
    if width < k or not k:
        return torch.full((len(score),), -torch.inf, dtype=torch.float64, device=score.device)
    shown = torch.arange(width, device=score.device) < visible[:, None]
    ranked = score.double().masked_fill(~shown | score.isnan(), -torch.inf)
    return ranked.topk(k, dim=1).values[:, -1]


@dataclass(frozen=True)
class Cut:
    """The boundary census of exercised rows, each [rows] fp64 or int64.

    kth, next      the k-th best score and the best one below the selection.
    equal          how many visible entries have exactly the k-th score; `tied`: some of them had to be left out.
    """

    kth: Tensor
    next: Tensor
    equal: Tensor
    tied: Tensor


def cut(score: Tensor, visible: Tensor, k: int) -> Cut:
    """Looks at both sides of the cut of rows that all have more than k visible entries. score [R, E]."""
    shown = torch.arange(score.shape[1], device=score.device) < visible[:, None]
    ranked = score.double().masked_fill(~shown | score.isnan(), -torch.inf)
    best = ranked.topk(k + 1, dim=1).values
    kth, below = best[:, k - 1], best[:, k]
    equal = (ranked == kth[:, None]).sum(1)
    return Cut(kth, below, equal, below == kth)
