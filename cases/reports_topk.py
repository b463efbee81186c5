"""Field reports about selection: T1, T2, T3, T6 (top-k), L3, L6, L7, L8 (its lengths and what lies past them)."""

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from ..reference.indexer import select
from .field_report import Component, Fault, FieldReport, Violation, draw

RATIO = 4
REPLAYS = 20


# ---------------------------------------------------------------------------------------------- the shared contract


def selection_violations(score: Tensor, visible: Tensor, k: int, picks: Tensor, label: str = "") -> list[Violation]:
    """Rules a selection breaks (contract K7), on the scores it was made from.

    score [R, W], visible [R] (negative counts as 0), picks [R, k]. Rules: `shape`, `range`, `unique`, `nan`, `padding`,
    `count`, `values` (the multiset of selected scores equals that of an exact top-k; ties at the cut are free).
    """
    if tuple(picks.shape) != (len(score), k):
        return [Violation("shape", f"{label}picks are {tuple(picks.shape)}, must be {(len(score), k)}")]
    found = []
    for row in range(len(score)):
        valid = score[row, : max(0, int(visible[row]))]
        broken = _row_violations(valid, k, picks[row].long())
        found += [Violation(rule, f"{label}row {row}: {message}") for rule, message in broken]
    return found


def _row_violations(valid: Tensor, k: int, picks: Tensor) -> list[tuple[str, str]]:
    found = []
    chosen = picks[picks != -1]
    outside = chosen[(chosen < 0) | (chosen >= len(valid))]
    if len(outside):
        found.append(("range", f"entry {int(outside[0])} of {len(valid)} visible"))
    inside = chosen[(chosen >= 0) & (chosen < len(valid))]
    repeats = len(inside) - len(set(inside.tolist()))
    if repeats:
        found.append(("unique", f"{repeats} entries more than once"))
    if (picks[: len(chosen)] == -1).any():
        found.append(("padding", "-1 before the last entry"))
    kept = valid[inside]
    if kept.isnan().any():
        found.append(("nan", f"entry {int(inside[kept.isnan()][0])} has score NaN"))
    numbers = valid[~valid.isnan()]
    due = min(k, len(numbers))
    if len(chosen) != due:
        found.append(("count", f"{len(chosen)} entries, must be {due}"))
    want = Counter(numbers.sort(descending=True).values[:due].tolist())
    lost = (want - Counter(kept.tolist())).total()
    if lost and not found:
        found.append(("values", f"{lost} of the {due} best scores are not selected"))
    return found


def _exact(score: Tensor, visible: Tensor, k: int) -> Tensor:
    return select(score, visible.clamp(min=0, max=score.shape[1]), k)


def _row(score: Tensor) -> tuple[Tensor, Tensor]:
    return score[None], torch.tensor([len(score)])


# ---------------------------------------------------------------------------------------------- T1: candidate buffer

CAP = 2048
BIN = 0.245
"""Width of the range [1, 1.245) whose values share one coarse bin (a quarter of a binade)."""


def _check_candidates(topk: Component) -> list[Violation]:
    found = []
    for count in (CAP - 1, CAP, CAP + 1, 2 * CAP, 2 * CAP + 1):
        for k in (512, 1024, 2048):
            score, visible = _row(1 + BIN * draw("t1").uniform(f"{count}", count))
            found += selection_violations(score, visible, k, topk(score, visible, k), f"{count} values, k {k}: ")
    return found


def _drops_candidates(score: Tensor, visible: Tensor, k: int, cap: int = CAP) -> Tensor:
    """Only the first `cap` members of the coarse bin at the cut become candidates."""
    out = torch.full((len(score), k), -1, dtype=torch.int32)
    for row, count in enumerate(visible.tolist()):
        valid = score[row, :count]
        coarse = (valid * 4).floor()
        order = coarse.sort(descending=True).values
        cut = order[min(k, count) - 1]
        above = (coarse > cut).nonzero()[:, 0]
        candidates = (coarse == cut).nonzero()[:cap, 0]
        best = valid[candidates].sort(descending=True).indices[: k - len(above)]
        chosen = torch.cat((above, candidates[best]))
        out[row, : len(chosen)] = chosen.int()
    return out


# ---------------------------------------------------------------------------------------------- T2: plateau

TIE_SLOTS = 1024


def _check_plateau(topk: Component) -> list[Violation]:
    k, count = 2048, 8320
    plateau = torch.zeros(count)
    plateau[draw("t2").permutation("positive", count)[:100]] = 1 + draw("t2").uniform("value", 100)
    infinite = draw("t2").normal("infinite", count)
    infinite[torch.tensor([5, 4000, count - 1])] = torch.inf
    found = []
    for label, row in (("plateau", plateau), ("all equal", torch.full((count,), 0.5)), ("infinite", infinite)):
        score, visible = _row(row)
        found += selection_violations(score, visible, k, topk(score, visible, k), f"{label}: ")
    return found


def _too_few_ties(score: Tensor, visible: Tensor, k: int, slots: int = TIE_SLOTS) -> Tensor:
    """At most `slots` entries that equal the k-th score are emitted; the rest of the row stays unwritten (-1)."""
    out = torch.full((len(score), k), -1, dtype=torch.int32)
    for row, count in enumerate(visible.tolist()):
        valid = score[row, :count]
        cut = valid.topk(min(k, count)).values[-1]
        above, level = (valid > cut).nonzero()[:, 0], (valid == cut).nonzero()[:, 0]
        chosen = torch.cat((above, level[: min(slots, k - len(above))]))
        out[row, : len(chosen)] = chosen.int()
    return out


# ---------------------------------------------------------------------------------------------- T3: ties


def _check_ties(topk: Component) -> list[Violation]:
    k = 32
    values = torch.cat((torch.full((16,), 2.0), torch.ones(32), torch.zeros(16)))
    score, visible = _row(values[draw("t3").permutation("order", len(values))])
    runs = [topk(score, visible, k) for _ in range(REPLAYS)]
    found = selection_violations(score, visible, k, runs[0])
    sets = [frozenset(run[0].tolist()) for run in runs]
    if len(set(sets)) > 1:
        found.append(Violation("replay", f"{len(set(sets))} different sets in {REPLAYS} runs of one call"))
    lowest = frozenset(_exact(score, visible, k)[0].tolist())
    if any(chosen != lowest for chosen in sets):
        found.append(Violation("lowest entry wins", "a tied entry is selected and a lower one is not"))
    return found


def _any_tie(score: Tensor, visible: Tensor, k: int) -> Tensor:
    """Among ties the choice depends on what ran before, as atomics do."""
    shuffled = torch.randperm(score.shape[1])
    return shuffled[score[:, shuffled].topk(k, dim=1).indices].int()


# ---------------------------------------------------------------------------------------------- T6: NaN


def _check_nan(topk: Component) -> list[Violation]:
    k, width = 512, 1243
    score = draw("t6").normal("score", 8, width)
    for row, share in enumerate((0.0, 0.5, 0.83, 1.0) * 2):
        score[row, draw("t6").permutation(f"nan/{row}", width)[: int(share * width)]] = torch.nan
    visible = torch.full((8,), width)
    return selection_violations(score, visible, k, topk(score, visible, k))


def _nan_first(score: Tensor, visible: Tensor, k: int) -> Tensor:
    """NaN compares as the largest value."""
    return score.topk(k, dim=1).indices.int()


# ---------------------------------------------------------------------------------------------- L3, L6, L7: lengths


def _check_past_end(topk: Component) -> list[Violation]:
    k, width, visible = 32, 128, torch.tensor([0, 5, 67])
    clean = draw("l3").normal("score", 3, width)
    found = []
    for fill in (1e30, torch.nan, torch.inf):
        score = clean.clone()
        score[torch.arange(width) >= visible[:, None]] = fill
        found += selection_violations(score, visible, k, topk(score, visible, k), f"{fill} past the end: ")
    return found


def _scans_padded_row(score: Tensor, visible: Tensor, k: int) -> Tensor:
    """Reads the whole padded row."""
    return _exact(score, torch.full_like(visible, score.shape[1]), k)


def _check_no_entries(topk: Component) -> list[Violation]:
    k, found = 8, []
    for lengths in ([0] * 8, [0] * 32, [0] * 33, [0] * 64, [0, 4, 0, 1]):
        visible = torch.tensor(lengths)
        score = torch.full((len(lengths), 16), torch.nan)
        score[:, :4] = draw("l6").normal("score", len(lengths), 4)
        label = f"{len(lengths)} rows of lengths {sorted(set(lengths))}: "
        found += selection_violations(score, visible, k, topk(score, visible, k), label)
    return found


def _at_least_one(score: Tensor, visible: Tensor, k: int) -> Tensor:
    """Length 0 is raised to 1 for the scheduler, and entry 0 comes out."""
    return _exact(score, visible.clamp(min=1), k)


def _check_negative_ends(topk: Component) -> list[Violation]:
    k, found = 8, []
    for ends in ([-1, 0, 1, 2], [-4, -3, -2, -1, 0, 1]):
        visible = torch.tensor(ends)
        score = draw("l7").normal("score", len(ends), 16)
        found += selection_violations(score, visible, k, topk(score, visible, k), f"ends {ends}: ")
    return found


def _unsigned_ends(score: Tensor, visible: Tensor, k: int) -> Tensor:
    """A negative end is read as an unsigned one, so the row seems to be of any length."""
    unsigned = torch.where(visible < 0, visible + (1 << 32), visible)
    return _exact(score, unsigned, k)


# ---------------------------------------------------------------------------------------------- L8: visibility


def _check_step_visibility(topk_of_positions: Component) -> list[Violation]:
    found = []
    for first in (4, 5, 6, 7, 13):
        position = torch.arange(first, first + 4)
        visible = (position + 1) // RATIO
        score = torch.arange(8.0).repeat(4, 1)  # the newest entry always scores highest
        picks = topk_of_positions(score, position, 1)
        found += selection_violations(score, visible, 1, picks, f"step at {first}: ")
    return found


def _per_token(score: Tensor, position: Tensor, k: int) -> Tensor:
    return select(score, (position + 1) // RATIO, k)


def _per_step(score: Tensor, position: Tensor, k: int) -> Tensor:
    """Every token of the step gets what its last token sees."""
    return select(score, ((position.max() + 1) // RATIO).expand(len(position)), k)


# ---------------------------------------------------------------------------------------------- the reports

_SGLANG = "https://github.com/sgl-project/sglang/"
_VLLM = "https://github.com/vllm-project/vllm/"


def _topk(code: str, name: str, urls: tuple[str, ...], **parts: Any) -> FieldReport:
    rest: dict[str, Any] = {"stage": "topk", "kind": "topk", "reference": _exact} | parts
    return FieldReport(id=f"{code.lower()}-{name}", code=code, urls=urls, **rest)


TOPK_REPORTS = (
    _topk(
        "T1",
        "candidate-buffer",
        (f"{_SGLANG}issues/36807", f"{_VLLM}pull/52149"),
        says="a bin with more members than a fixed candidate buffer loses true winners",
        contract="the selected values equal those of an exact top-k",
        check=_check_candidates,
        faults=(Fault("buffer of 2,048 candidates", "values", _drops_candidates),),
    ),
    _topk(
        "T2",
        "plateau",
        (f"{_SGLANG}pull/30512", f"{_SGLANG}pull/30645"),
        says="8,320 scores, 100 positive, the rest exactly 0: slots stay unwritten",
        contract="min(visible, k) valid, unique entries, every score above the plateau among them",
        check=_check_plateau,
        faults=(Fault("1,024 slots for ties", "count", _too_few_ties),),
    ),
    _topk(
        "T3",
        "ties",
        (f"{_SGLANG}pull/31115", f"{_SGLANG}pull/24654"),
        says="tied scores at the cut: other sets on replay",
        contract="the multiset of values is right; where the policy says so, the lowest entry wins and replays agree",
        check=_check_ties,
        faults=(Fault("choice by arrival", "replay", _any_tie),),
        opt_in=("replay", "lowest entry wins"),
    ),
    _topk(
        "T6",
        "nan-scores",
        (f"{_VLLM}issues/49896", f"{_VLLM}pull/49897"),
        says="NaN scores come out as entries, or as uninitialised slots",
        contract="no NaN is selected; rows with too few numbers are padded with -1",
        check=_check_nan,
        faults=(Fault("NaN as the largest", "nan", _nan_first),),
    ),
    _topk(
        "L7",
        "negative-ends",
        (f"{_VLLM}pull/56464", f"{_SGLANG}pull/30378"),
        says="a step of more tokens than the sequence has: ends -1, 0, 1, 2 or -4 to 1",
        contract="a negative end is an empty row",
        check=_check_negative_ends,
        faults=(Fault("unsigned end", "range", _unsigned_ends),),
    ),
    _topk(
        "L6",
        "no-entries",
        (f"{_VLLM}issues/51970", f"{_VLLM}pull/51972"),
        says="every compressed length is 0, in batches of 8, 32, 33 and 64",
        contract="a row without entries selects none, and nothing past its end is read",
        check=_check_no_entries,
        faults=(Fault("length raised to 1", "range", _at_least_one),),
    ),
    _topk(
        "L3",
        "past-row-end",
        ("https://github.com/NVIDIA/TensorRT-LLM/pull/16789", f"{_VLLM}pull/50008"),
        says="stale scores past the end of a row are picked",
        contract="what lies past `visible` changes no selection",
        check=_check_past_end,
        faults=(Fault("padded row scanned", "range", _scans_padded_row),),
    ),
    _topk(
        "L8",
        "step-visibility",
        ("https://github.com/ROCm/ATOM/pull/2101", "https://github.com/hw-native-sys/pypto-lib/pull/715"),
        says="all tokens of a step get the visible length of its last one",
        contract="the token at position p sees (p + 1) // 4 entries",
        kind="topk_of_positions",
        reference=_per_token,
        check=_check_step_visibility,
        faults=(Fault("one length a step", "range", _per_step),),
    ),
)
