"""The certified selection: recall, and for every swapped entry whether the declared formats explain it."""

from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from .certify import epsilon
from .cut_sample import cut_facts
from .measured import Measured
from .paths.base import Declaration
from .record import Finding, Worst
from .reference.chunks import slices
from .reference.inputs import LayerInputs
from .selection import as_mask
from .text import apart
from .trace import Trace

CHUNK_BYTES = {"cpu": 2**20, "cuda": 2**24}
"""Bytes of the scores and queries of the rows looked at together, in fp64: on a CPU few enough to stay in a core's
cache, on a GPU some hundred rows, so that starting kernels and waiting for them costs little a row."""


def compare_selection(inputs: LayerInputs, trace: Trace, baseline: Trace, declares: Declaration) -> Measured:
    """Recall of exercised rows, certified swaps and the boundary census against the baseline's scores.

    A swapped entry (selected by one side only) is explained iff the baseline's score of it lies within eps_i + eps_k of
    the k-th, eps being what declared formats and arithmetic may do to a score (`certify.epsilon`). `swap_excess` is the
    largest distance in units of that; above 1 it is a finding, whatever the recall.
    """
    visible, k = inputs.visible, trace.value("topk").shape[1]
    exercised = (visible > k).nonzero()[:, 0]
    if not len(exercised):
        longest = int(visible.max()) if len(visible) else 0
        return Measured(
            skipped="selection not exercised",
            facts={"why": f"the longest row has {longest} visible entries and k is {k}"},
        )
    cut = cuts(inputs, trace, baseline, declares, exercised)
    metrics = {"rows_exercised": float(len(exercised))} | _metrics(cut)
    worst, findings = _worst(cut, exercised)
    bounds = {"swap_excess": 1.0, "unexplained": 0.0}
    facts = {"unit": "share of the baseline's selection"}
    facts |= cut_facts(inputs, trace, baseline, cut.recall, exercised, cut.gap.tolist())
    return Measured(metrics, bounds, findings, worst, facts=facts)


def _distribution(name: str, share: Tensor) -> dict[str, float]:
    """Mean, median, first percentile and worst row."""
    return {
        name: float(share.mean()),
        f"{name}_median": float(share.quantile(0.5)),
        f"{name}_p1": float(share.quantile(0.01)),
        f"{name}_worst": float(share.min()),
    }


class Cuts(NamedTuple):
    """The selection of exercised rows and the cut it was made at, each [n].

    recall, value_recall share of the baseline's selection, and of the row's own whose score reaches the k-th best.
    gap                  between the cut's two sides, in units of the sum of their eps.
    tied                 no gap.
    band, equal          entries within 2 eps of the k-th score, and with exactly that score.
    eps                  of the k-th entry.
    swapped, unexplained entries, and those beyond what the declared formats explain.
    excess               the largest distance of a swapped entry from the cut, in units of `width`; -1 without any.
    entry, score, kth, width   of that entry, the lowest-numbered one of the largest excess.
    """

    recall: Tensor
    value_recall: Tensor
    gap: Tensor
    tied: Tensor
    band: Tensor
    equal: Tensor
    eps: Tensor
    swapped: Tensor
    unexplained: Tensor
    excess: Tensor
    entry: Tensor
    score: Tensor
    kth: Tensor
    width: Tensor


def cuts(inputs: LayerInputs, trace: Trace, baseline: Trace, declares: Declaration, rows: Tensor) -> Cuts:
    """Looks at the cut of `rows` [n] int64, which all have more than k visible entries. Results are on the CPU."""
    config = inputs.config
    row_bytes = 8 * (baseline.value("score").shape[1] + config.index_n_heads * config.index_head_dim)
    parts = slices(len(rows), row_bytes, CHUNK_BYTES[rows.device.type])
    found = [_look(inputs, trace, baseline, declares, rows[part]) for part in parts]
    return Cuts(*(torch.cat(column).cpu() for column in zip(*found, strict=True)))


def _look(inputs: LayerInputs, trace: Trace, baseline: Trace, declares: Declaration, rows: Tensor) -> Cuts:
    """`cuts` of so few rows that they fit memory.

    Entries looked at, [n, 2 + m]: the cut's two sides, then the swapped ones of each row, padded with the k-th.
    """
    visible, k = inputs.visible[rows], trace.value("topk").shape[1]
    runs = [(count, len(list(run))) for count, run in groupby(visible.tolist())]
    width = max(count for count, _ in runs)
    shown = torch.arange(width, device=rows.device) < visible[:, None]
    score = baseline.value("score")[rows, :width].double().masked_fill(~shown, -torch.inf)
    sides = _sides(score, runs, k)
    mine, theirs = (as_mask(side.value("topk")[rows], width) & shown for side in (trace, baseline))
    differ = mine != theirs
    count, (row, entry) = differ.sum(1), differ.nonzero(as_tuple=True)
    entries = sides[:, :1].repeat(1, 2 + max(1, int(count.max())))
    entries[:, 1] = sides[:, 1]
    entries[row, 2 + torch.arange(len(row), device=rows.device) - (count.cumsum(0) - count)[row]] = entry
    eps, value = epsilon(inputs, rows, entries, baseline, declares).total, score.gather(1, entries)
    kth, eps_kth = value[:, :1], eps[:, :1]
    gap = value[:, 0] - value[:, 1]
    distance, limit = (value - kth).abs()[:, 2:], (eps + eps_kth)[:, 2:]
    excess = torch.where(distance == 0, 0.0, distance / limit)
    peak = excess.argmax(1, keepdim=True)
    return Cuts(
        recall=1 - (theirs & ~mine).sum(1).double() / theirs.sum(1).clamp(min=1),
        value_recall=(mine & (score >= kth)).sum(1).double() / k,
        gap=torch.where(gap == 0, 0.0, gap / (eps[:, 0] + eps[:, 1])),
        tied=gap == 0,
        band=((score - kth).abs() <= 2 * eps_kth).sum(1),
        equal=(score == kth).sum(1),
        eps=eps[:, 0],
        swapped=count,
        unexplained=(excess > 1).sum(1),
        excess=torch.where(count > 0, excess.gather(1, peak)[:, 0], -1.0),
        entry=entries.gather(1, 2 + peak)[:, 0],
        score=value.gather(1, 2 + peak)[:, 0],
        kth=value[:, 0],
        width=limit.gather(1, peak)[:, 0],
    )


def _sides(score: Tensor, runs: list[tuple[int, int]], k: int) -> Tensor:
    """The k-th best entry of each row and the next, [n, 2]; runs: (visible entries, number) of successive rows alike.

    A run is ranked without padding, which could change the order of equal scores.
    """
    parts = score.split([number for _, number in runs])
    ranked = [part[:, :count].topk(k + 1).indices for part, (count, _) in zip(parts, runs, strict=True)]
    return torch.cat(ranked)[:, k - 1 :]


def _metrics(cut: Cuts) -> dict[str, float]:
    return {
        **_distribution("recall", cut.recall),
        **_distribution("value_recall", cut.value_recall),
        "swapped": float(cut.swapped.sum()),
        "unexplained": float(cut.unexplained.sum()),
        "swap_excess": float(cut.excess.clamp(min=0.0).max()),
        "gap_median": float(cut.gap.quantile(0.5)),
        "gap_least": float(cut.gap.min()),
        "band_mean": float(cut.band.double().mean()),
        "band_most": float(cut.band.max()),
        "equal_at_cut": float(cut.equal.max()),
        "tied_rows": float(cut.tied.sum()),
        "eps_mean": float(cut.eps.mean()),
    }


def _worst(cut: Cuts, rows: Tensor) -> tuple[Worst | None, list[Finding]]:
    """The swapped entry furthest from its cut (None without any), and a finding when nothing explains it."""
    peak = int(cut.excess.argmax())
    if cut.excess[peak] < 0:
        return None, []
    where = {"row": int(rows[peak]), "entry": int(cut.entry[peak])}
    worst = Worst(where, *(float(part[peak]) for part in (cut.score, cut.kth, cut.width)))
    if not cut.excess[peak] > 1:
        return worst, []
    got, want, bound = apart(worst.got, worst.want, worst.bound)
    side = "leaves out" if worst.got > worst.want else "selects"
    message = (
        f"row {where['row']} {side} entry {where['entry']}, whose exact score {got} is further from the cut {want} "
        f"than the declared formats explain ({bound})"
    )
    return worst, [Finding("unexplained_swap", message, where)]
