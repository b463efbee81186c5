"""What a sweep runs: paths as they are, and ablations of one of them: number formats, Hadamard sides, public bugs.

An ablation changes one building-block method of a path object (the mechanism of `difftest.mutants`) and nothing else.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import MethodType
from typing import Literal

from torch import Tensor

from ..paths import _sglang_math as math_
from ..paths.base import Path, Rounding, get_path
from ..paths.sglang_fp8_model import SGLANG_FP8, SglangFp8Model
from ..reference.inputs import LayerInputs
from ..stages import StageName, nearest
from ..trace import StageTensors, Trace

Group = Literal["path", "formats", "hadamard", "bugs"]
Ablation = Literal["topk", "formats", "hadamard", "bugs"]
ABLATIONS: dict[Ablation, str] = {
    "topk": "every variant also with the other index_topk: 512 and 1,024",
    "formats": "fp8 K only, fp8 q only, both, bf16 both, DeepSeek's FP4",
    "hadamard": "fp8 with the Hadamard transform on both sides, on the query only, on the key only, on neither",
    "bugs": "each root-caused public bug as a fault in the fp8 path",
}
TOPK = (512, 1024)
"""index_topk of V4-Flash and of V4-Pro."""

INDEX_STAGES: tuple[StageName, ...] = ("compressed", "index_k", "index_q", "head_weight", "score", "topk")
BASE = "sglang-fp8-model"
CPU_PATHS = ("oracle", "deepseek", "sglang-fp8-model", "sglang-fp4-model", "bf16-k")
GPU_PATHS = ("oracle", "deepseek", "sglang-fp8", "sglang-fp8-model", "bf16-k")


@dataclass(frozen=True)
class Variant:
    """One thing that is swept.

    name   unique; what grids and conclusions call it.   group   `path`, or the ablation it belongs to.
    says   what it is, in a few words.   make   opens it; each world gets a fresh one.
    """

    name: str
    group: Group
    says: str
    make: Callable[[], Path]


class Formats(SglangFp8Model):
    """SGLang's fp8 path with the key, the query or both kept in bf16 instead, rounded once."""

    name = "formats"

    def __init__(self, key: str = "fp8", query: str = "fp8") -> None:
        super().__init__()
        self.key, self.query = key, query
        stored = {"fp8": Rounding(stored="e4m3"), "bf16": Rounding(stored="bf16")}
        self.declares = replace(SGLANG_FP8, key=stored[key], query=stored[query])

    def index_k(self, inputs: LayerInputs, trace: Trace) -> StageTensors:
        if self.key == "fp8":
            return super().index_k(inputs, trace)
        assert inputs.index is not None
        pooled, position = trace.value("compressed"), self.entry_position(inputs)
        return {"value": math_.to_bf16(self.prepare_key(inputs, pooled, inputs.index.norm_weight, position))}

    def index_q(self, inputs: LayerInputs, trace: Trace) -> StageTensors:
        if self.query == "fp8":
            return super().index_q(inputs, trace)
        assert inputs.index_query is not None
        return {"value": math_.to_bf16(self.prepare_query(inputs, inputs.index_query.float()))}


def hadamard_on(key: bool, query: bool) -> Path:
    """SGLang's fp8 path with the Hadamard transform on the sides named."""
    path = SglangFp8Model()
    if not key:
        path.prepare_key = MethodType(_key_without, path)  # type: ignore[method-assign]
    if not query:
        path.prepare_query = MethodType(_query_without, path)  # type: ignore[method-assign]
    return path


def _key_without(
    self: SglangFp8Model, inputs: LayerInputs, pooled: Tensor, weight: Tensor, positions: Tensor
) -> Tensor:
    normed = self.norm(pooled, weight, inputs.config.rms_norm_eps)
    return self.rotate(normed, self.rope_table(inputs, positions))


def _query_without(self: SglangFp8Model, inputs: LayerInputs, query: Tensor) -> Tensor:
    return self.rotate(query, self.rope_table(inputs, inputs.row_position).unsqueeze(1))


FORMATS = (
    Variant("fp8 K only", "formats", "keys in fp8, queries in bf16", lambda: Formats("fp8", "bf16")),
    Variant("fp8 q only", "formats", "queries in fp8, keys in bf16", lambda: Formats("bf16", "fp8")),
    Variant("fp8 q and K", "formats", "both in fp8, as SGLang ships them", lambda: Formats("fp8", "fp8")),
    Variant("bf16 q and K", "formats", "both in bf16", lambda: Formats("bf16", "bf16")),
    Variant("DeepSeek FP4", "formats", "both in FP4, bf16 scores, as published", lambda: get_path("deepseek")),
)
HADAMARD = (
    Variant("Hadamard on both", "hadamard", "as published", lambda: hadamard_on(True, True)),
    Variant("Hadamard on q only", "hadamard", "keys stored without it", lambda: hadamard_on(False, True)),
    Variant("Hadamard on K only", "hadamard", "queries left without it", lambda: hadamard_on(True, False)),
    Variant("Hadamard on neither", "hadamard", "left out on both sides", lambda: hadamard_on(False, False)),
)


def bug_variants() -> list[Variant]:
    """Every public bug that has a fault in an indexer stage of the fp8 path."""
    from ..mutants.registry import mutants, plant

    found = []
    for name, mutant in mutants(BASE).items():
        if mutant.report[:1] not in ("K", "D") and mutant.stage_in(BASE) in INDEX_STAGES:
            found.append(Variant(name, "bugs", mutant.says, lambda name=name: plant(BASE, name)))  # type: ignore[misc]
    return found


def path_variant(spec: str) -> Variant:
    """A registered path by its spec. ValueError with the nearest names, or with the options it takes."""
    return Variant(spec, "path", get_path(spec).says, lambda: get_path(spec))


def check_ablations(names: Sequence[str]) -> tuple[Ablation, ...]:
    """Ablations as given on the command line, `all` for all. ValueError with the nearest names otherwise."""
    if "all" in names:
        return tuple(ABLATIONS)
    for name in names:
        if name not in ABLATIONS:
            raise ValueError(nearest(name, [*ABLATIONS, "all"], "ablation").split("? `")[0] + "?")
    return tuple(name for name in ABLATIONS if name in names)


def ablation_variants(ablations: Sequence[Ablation]) -> list[Variant]:
    """The variants of these ablations (`topk` adds none: it is another k for all)."""
    found: list[Variant] = []
    found += FORMATS if "formats" in ablations else ()
    found += HADAMARD if "hadamard" in ablations else ()
    found += bug_variants() if "bugs" in ablations else []
    return found
