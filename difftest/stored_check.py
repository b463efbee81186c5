"""Judges a tensor in the format it is stored in: plain numbers, or codes with scales."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from . import findings
from .ball import UNIT_FP32, Ball
from .measured import Measured, plain
from .metrics import Locate, Tally, unravel
from .quantised import Codes, code_values, is_quantised, judge_codes
from .record import Finding, Worst
from .reference.formats import SCALINGS
from .stages import StageName
from .text import apart, place
from .trace import StageTensors

Pieces = Iterable[tuple[slice, Ball]]
"""Pieces of a tensor along its first axis: the slice, and the ball of what should be stored there."""


def check_stored(stage: StageName, stored: str, tensors: StageTensors, locate: Locate, pieces: Pieces) -> Measured:
    """Judges keys or queries (`value`, and `codes` and `scale` where the path gives them) in their stored format."""
    value = tensors["value"]
    bad = findings.not_finite(stage, value, locate)
    if bad:
        return Measured(findings=bad)
    if not is_quantised(stored):
        return _check_plain(stage, stored, value, locate, pieces)
    judge = QuantisedJudge(stage, stored, locate)
    codes, scale = tensors.get("codes"), judge.usable_scale(value, tensors.get("scale"))
    for rows, ball in pieces:
        judge.add(value[rows].double(), ball, None if scale is None else scale[rows], rows.start)
        if codes is not None and scale is not None and codes.shape == value.shape:
            judge.check_readback(value[rows].double(), codes[rows], scale[rows], rows.start)
    return judge.measured()


def _check_plain(stage: StageName, stored: str, value: Tensor, locate: Locate, pieces: Pieces) -> Measured:
    tally = Tally("bf16" if stored == "bf16" else "fp32", locate)
    coarse: list[Finding] = []
    for rows, ball in pieces:
        got = value[rows].double()
        tally.add(got, ball, rows.start)
        if tally.format == "fp32" and not coarse:
            coarse = findings.granularity(stage, got, ball.mid)
    measured = plain(tally, "error norm / norm")
    measured.findings += coarse
    return measured


@dataclass
class ScaleTally:
    """Worst scale of a tensor, its relative error and the bound that goes with it."""

    locate: Locate
    excess: float = 0.0
    error: float = 0.0
    allowed: float = 0.0
    worst: Worst | None = None

    def add(self, part: Codes, start: int) -> None:
        """The scales of a piece."""
        got, ball, excess = part.scale, part.scale_ball, part.scale_excess
        if not got.numel():
            return
        judged = ball.rad.isfinite() & got.isfinite()
        if bool(judged.any()):
            size = part.scale_want.clamp(min=torch.finfo(torch.float64).tiny)
            off = (got - part.scale_want).abs() / size
            self.error = max(self.error, float(off[judged].max()))
            # What the bounds let pass: the radius and the scale's own rounding (a whole factor 2 for powers of two).
            open_ = torch.maximum(ball.rad / size + UNIT_FP32, off * (excess <= 1))
            self.allowed = max(self.allowed, float(open_[judged].max()))
        peak = int(excess.argmax())
        if self.worst is None or float(excess.flatten()[peak]) > self.excess:
            self.excess = float(excess.flatten()[peak])
            first, *rest = unravel(peak, tuple(excess.shape))
            where = self.locate((first + start, *rest))
            where["block"] = where.pop("dim", rest[-1])
            self.worst = Worst(where, *(float(t.flatten()[peak]) for t in (got, ball.mid, ball.rad)))


@dataclass
class QuantisedJudge:
    """Judges codes in units of the path's own scale, and scales by themselves, piece by piece.

    name   of the tensor in messages.   stored   its quantiser.
    """

    name: str
    stored: str
    locate: Locate
    findings: list[Finding] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.codes = Tally(SCALINGS[self.stored].format.name, self.locate)
        self.scales = ScaleTally(self.locate)

    def usable_scale(self, value: Tensor, scale: Tensor | None) -> Tensor | None:
        """`scale` if it has the declared blocks; a finding and None otherwise."""
        blocks = value.shape[-1] // min(SCALINGS[self.stored].block, value.shape[-1])
        want = (*value.shape[:-1], blocks)
        if scale is None or tuple(scale.shape) == want:
            return scale
        self.findings.append(
            Finding("shape", f"{self.name}.scale is {list(scale.shape)}, and {self.stored} has {list(want)}")
        )
        return None

    def add(self, got: Tensor, ball: Ball, scale: Tensor | None, start: int) -> None:
        """A piece: got fp64 (code * scale), its ball before quantisation, and the path's scales if it gives them."""
        if not got.numel():
            return
        part = judge_codes(self.stored, got, ball, scale)
        self.codes.add(part.got, part.ball, start)
        self.scales.add(part, start)
        if bool(part.off_grid.any()) and not self._found("grid"):
            first = [int(index) for index in part.off_grid.nonzero()[0]]
            value = float(got[tuple(first)])
            where = self._where(first, start)
            message = f"{self.name} at {place(where)} is {value:.9g}, which is no {self.stored} code times its scale"
            self.findings.append(Finding("grid", message, where))

    def check_readback(self, got: Tensor, codes: Tensor, scale: Tensor, start: int) -> None:
        """The dequantised value must be the stored code times the stored scale, within the product's rounding."""
        if not got.numel() or self._found("readback"):
            return
        want = code_values(self.stored, codes, scale)
        off = ~((got - want).abs() <= 2 * UNIT_FP32 * want.abs())
        if bool(off.any()):
            first = [int(index) for index in off.nonzero()[0]]
            read, stored = apart(float(got[tuple(first)]), float(want[tuple(first)]))
            where = self._where(first, start)
            message = (
                f"{self.name} at {place(where)} is read as {read}, and its stored code times its scale is {stored}"
            )
            self.findings.append(Finding("readback", f"{message}; {int(off.sum())} such values", where))

    def _where(self, index: list[int], start: int) -> dict[str, int]:
        return self.locate((index[0] + start, *index[1:]))

    def _found(self, rule: str) -> bool:
        return any(finding.rule == rule for finding in self.findings)

    def measured(self) -> Measured:
        """Metrics of codes and scales together."""
        codes, scales = self.codes, self.scales
        by_scale = scales.excess > codes.excess
        metrics = {
            "excess": max(codes.excess, scales.excess),
            "deviation": float(codes.code_distance),
            "equal": codes.equal_share,
            "codes_equal": codes.equal_share,
            "code_distance": float(codes.code_distance),
            "scale_error": scales.error,
            "scale_excess": scales.excess,
        }
        limits = {"excess": 1.0, "deviation": float(codes.code_allowed), "scale_error": scales.allowed}
        facts = {"unit": "codes", "judged": codes.elements, "worst_unit": "scale" if by_scale else "code value"}
        if codes.unjudged:
            facts["unjudged"] = codes.unjudged
        return Measured(metrics, limits, self.findings, scales.worst if by_scale else codes.worst, "", facts)
