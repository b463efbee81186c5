"""A field report: a public bug report turned into a small input, a contract that can fail, and its seeded fault."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from .draw import Draw

Component = Callable[..., Any]

ComponentKind = Literal[
    "topk",
    "topk_of_positions",
    "score",
    "rotate",
    "index_key",
    "pool_in_chunks",
    "pool_batch",
    "verify_and_roll_back",
    "store_and_read",
    "page_offset",
    "attention",
]

COMPONENTS: dict[ComponentKind, str] = {
    "topk": "(score [R, W] fp32, visible [R] int64, k) -> entries [R, k] int, -1 padded",
    "topk_of_positions": "(score [R, W] fp32, position [R] int64 of one request's step, k) -> entries [R, k] int",
    "score": "(query [R, H, D], key [E, D], weight [R, H], all fp32 and final) -> [R, E]",
    "rotate": "(x [n, D] fp32, position [n] int64, layer kind) -> [n, D]",
    "index_key": "(pooled [n, D] fp32, norm_weight [D] fp32, entry [n] int64) -> keys as the scorer reads them [n, D]",
    "pool_in_chunks": "(chunks of kv_score [t, 4 D] fp32, ape [8, D]) -> after each chunk, all entries so far [e, D]",
    "pool_batch": "(kv_score [t, 4 D] fp32 of each request, ape [8, D]) -> entries [t // 4, D] of each request",
    "verify_and_roll_back": "(prefill, draft, accepted count, following tokens, ape) -> entries of the kept [e, D]",
    "store_and_read": "(key [n, D] fp32, slot [n] int64, pages) -> the keys read back from these slots [n, D]",
    "page_offset": "(page [n] int32, bytes between pages) -> byte offset [n] int64",
    "attention": "(q [R, A, C], kv [E, C], index [R, k] with -1, sink [A], scale) -> out [R, A, C], lse [R, A]",
}
"""Call contract of each kind of component. Adapt a path's own function to it and hand it to `FieldReport.check`."""


@dataclass(frozen=True)
class Violation:
    """One rule of a contract that a component broke, and where."""

    rule: str
    message: str


@dataclass(frozen=True)
class Fault:
    """An emulation of the reported bug: a component that must break `rule`."""

    name: str
    rule: str
    component: Component


@dataclass(frozen=True)
class FieldReport:
    """A named case made of a public report.

    id         names it; starts with the report's code.   code   its name in the list of reports.
    stage      the stage at fault.   kind   the kind of component that is checked.
    urls       the public threads.   says   the symptom and its trigger, in a line.
    contract   what must hold.
    check      runs the small inputs through a component of `kind` and returns every broken rule.
    reference  a component that keeps the contract.   faults   components that break it.
    opt_in     rules that are a policy (determinism, batch invariance): whoever has no such policy leaves them out.
    """

    id: str
    code: str
    stage: str
    kind: ComponentKind
    urls: tuple[str, ...]
    says: str
    contract: str
    check: Callable[[Component], list[Violation]]
    reference: Component
    faults: tuple[Fault, ...]
    opt_in: tuple[str, ...] = ()


FORMAT_SLACK = 0.25
"""Largest root-mean-square error of a key row, relative to its root mean square, that a storage format may cause. The
coarsest format, e2m1 with a power-of-two scale a block, is off by at most a quarter of any element above its smallest
normal (2.5 stored as 2 or 3), and by 0.115 in the root mean square of Gaussian data. The seeded faults are off by 0.65
and more."""


def draw(report: str) -> Draw:
    """The random streams of a report's inputs."""
    return Draw(sum(ord(letter) << (8 * place) for place, letter in enumerate(report)))


def row_error(got: Tensor, want: Tensor) -> Tensor:
    """Root-mean-square error of each row relative to the wanted row, [n, D] twice -> [n] fp64; infinite for a NaN."""
    error = (got.double() - want.double()).square().mean(-1).sqrt()
    error = error / want.double().square().mean(-1).sqrt().clamp_min(torch.finfo(torch.float64).tiny)
    return error.nan_to_num(nan=torch.inf)


def wrong_rows(rule: str, got: Tensor, want: Tensor, slack: float, labels: list[str]) -> list[Violation]:
    """A violation of `rule` for each row whose `row_error` exceeds `slack`; another for a wrong shape."""
    if got.shape != want.shape:
        return [Violation(rule, f"shape is {tuple(got.shape)}, must be {tuple(want.shape)}")]
    error = row_error(got, want)
    return [
        Violation(rule, f"{labels[row]}: relative error {error[row]:.3g}, at most {slack:.3g}")
        for row in (error > slack).nonzero()[:, 0].tolist()
    ]
