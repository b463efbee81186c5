"""What a path is, and how one is found by name."""

import sys
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import ClassVar, Literal

from ..reference.inputs import LayerInputs
from ..stages import STAGES, StageName, nearest, stages_of
from ..trace import StageTensors, Trace

Round = Literal["none", "bf16"]
"""A declared rounding point: none (kept in the arithmetic's own precision) or round to nearest even to bf16."""

Quantiser = Literal["none", "bf16", "e4m3", "e4m3_pow2", "e2m1", "e2m1_ties_down"]
"""Format a key, query or latent is stored in. e4m3: one raw fp32 scale per 128 = max(1e-4, amax) / 448. e4m3_pow2:
power-of-two scale per block of 64. e2m1: block 32, power-of-two scale, ties to even; e2m1_ties_down: strict thresholds
(SGLang's fp4)."""

Arithmetic = Literal["fp64", "fp32", "fp32_fast", "bf16", "fp8_wgmma"]
"""What sums are made in: fp64, fp32, fp32 with approximate exp and division, bf16 roundings per step as published,
or the 14-bit accumulator of Hopper's fp8 tensor core."""


@dataclass(frozen=True)
class Rounding:
    """Every rounding point of index-key or index-query preparation, in order of computation."""

    pooled: Round = "none"
    normed: Round = "none"
    rotated: Round = "none"
    transformed: Round = "none"
    stored: Quantiser = "none"


@dataclass(frozen=True)
class Declaration:
    """What a path says about itself; the isolated check applies exactly this and nothing else.

    key, query        rounding points of index_k and index_q (for a query, pooled and normed do not exist).
    weight            rounding of the head weight after scaling.
    score             arithmetic of the scores; `score_rounds`: products, weighted terms and sum each rounded to bf16.
    pool              arithmetic of the gated pooling.
    window, latent    format of the no-RoPE dims of the window and compressed latents, with the rounding before it.
    rope_tail         rounding points of the latent's RoPE dims: normed, rotated (stored is bf16 or none).
    attention         arithmetic of attention; `probability`: rounding of P before the PV product; `output`: of the sum.
    """

    key: Rounding = Rounding()
    query: Rounding = Rounding()
    weight: Round = "none"
    pool: Arithmetic = "fp32"
    score: Arithmetic = "fp32"
    score_rounds: Round = "none"
    window: Rounding = Rounding()
    latent: Rounding = Rounding()
    rope_tail: Rounding = Rounding()
    attn_query: Rounding = Rounding()
    attention: Arithmetic = "fp32"
    probability: Round = "none"
    output: Round = "none"


@dataclass(frozen=True)
class Availability:
    """Whether a path can run here; if not, why, and the command that changes that."""

    ok: bool
    why: str = ""
    install: str = ""


class CannotFeed(ValueError):
    """An upstream tensor cannot be given to a path's kernel: it is not exact in the format that the kernel reads.

    Raised by a stage method when another path's stage was substituted; `blame` reads it as "not answerable this way".
    """


class Path:
    """One implementation of every stage. Subclass it, implement the stage methods, register it as an entry point.

    A stage method has the stage's name, takes the inputs and the trace so far (it reads only the stages that its row in
    `STAGES` names) and returns that stage's tensors. Because it reads them from the trace, any stage can be replaced by
    another path's.
    """

    name: str
    says: ClassVar[str]
    declares: Declaration

    def availability(self) -> Availability:
        return Availability(True)

    def run(self, inputs: LayerInputs, case: str, given: Trace | None = None, upto: StageName | None = None) -> Trace:
        """Runs the stages of this layer kind in order; stages found in `given` are taken from it instead."""
        trace = Trace(case, inputs.layer, self.name)
        for stage in stages_of(inputs.kind):
            trace.stages[stage] = given[stage] if given and stage in given else self.stage(stage, inputs, trace)
            if stage == upto:
                break
        return trace

    def stage(self, stage: StageName, inputs: LayerInputs, trace: Trace) -> StageTensors:
        """Tensors of one stage, computed from `inputs` and the upstream stages in `trace`."""
        tensors: StageTensors = getattr(self, stage)(inputs, trace)
        missing = set(STAGES[stage].tensors) - set(tensors)
        if missing:
            raise ValueError(f"path {self.name} returned no {', '.join(sorted(missing))} for stage {stage}")
        return tensors


def path_classes() -> dict[str, type[Path]]:
    """Registered path classes by name, from the entry points of group `difftest.paths`; loads every module."""
    return {name: point.load() for name, point in path_points().items()}


def path_names() -> list[str]:
    return sorted(path_points())


def path_points() -> dict[str, EntryPoint]:
    """Entry points of group `difftest.paths` by name."""
    return _points(tuple(sys.path))


@lru_cache(maxsize=4)
def _points(_places: tuple[str, ...]) -> dict[str, EntryPoint]:
    """Looked up once for a search path: reading every installed package's metadata takes up to tens of milliseconds."""
    return {point.name: point for point in entry_points(group="difftest.paths")}


def get_path(spec: str) -> Path:
    """A path from its spec: `name` or `name:option=value,option=value` (`bf16-k:q=fp8`).

    Raises ValueError with the nearest names for an unknown name, and with the options it has for an unknown option.
    """
    name, _, tail = spec.partition(":")
    points = path_points()
    if name not in points:
        raise ValueError(nearest(name, list(points), "path"))
    options = dict(part.split("=", 1) for part in tail.split(",")) if tail else {}
    try:
        path: Path = points[name].load()(**options)
        if options:
            path.name = spec
    except TypeError as error:
        raise ValueError(f"path {name} does not take {tail!r}: {error}") from error
    return path
