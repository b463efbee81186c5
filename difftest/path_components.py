"""A path's stages as the components that field reports check (`cases.field_report.COMPONENTS`)."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .cases.case import Case
from .cases.field_report import Component, ComponentKind, FieldReport, Violation
from .cases.generate import generate
from .paths.base import Path
from .reference.inputs import LayerInputs, Span
from .stages import StageName
from .trace import StageTensors, Trace

LAYER = 2
RATIO = 4
SMALL = {"num_attention_heads": 1, "head_dim": 64, "sliding_window": 1}
"""Overrides that keep the tensors small which no component reads."""


class PathComponents:
    """Feeds one stage of `path` with given upstream tensors, in the call contracts of field reports.

    Produced by whoever wants a path checked, consumed by `FieldReport.check`. Only what a stage boundary separates can
    be fed: rotation, storing, page offsets, rollback and bare attention are inside stages and have no component here.
    """

    def __init__(self, path: Path, device: str = "cpu") -> None:
        self.path, self.device = path, device
        self._of_kind: dict[ComponentKind, Component] = {
            "topk": self.topk,
            "topk_of_positions": self.topk_of_positions,
            "score": self.score,
            "index_key": self.index_key,
            "pool_in_chunks": self.pool_in_chunks,
            "pool_batch": self.pool_batch,
        }

    def check(self, report: FieldReport, policies: Sequence[str] = ()) -> list[Violation] | None:
        """Rules of `report` that the path breaks; None if the report's kind of component cannot be fed from outside.

        Opt-in rules count only if named in `policies`.
        """
        component = self._of_kind.get(report.kind)
        if component is None:
            return None
        ignored = set(report.opt_in) - set(policies)
        return [violation for violation in report.check(component) if violation.rule not in ignored]

    def topk(self, score: Tensor, visible: Tensor, k: int) -> Tensor:
        return self.topk_of_positions(score, RATIO * visible + RATIO - 2, k)

    def topk_of_positions(self, score: Tensor, position: Tensor, k: int) -> Tensor:
        inputs = self._inputs((RATIO * score.shape[1] + RATIO - 1,), pooled_prefix=score.shape[1], index_topk=k)
        inputs = replace(inputs, row_request=torch.zeros_like(position), row_position=position)
        return self._stage("topk", inputs, score={"value": score})["value"]

    def score(self, query: Tensor, key: Tensor, weight: Tensor) -> Tensor:
        rows, heads, _ = query.shape
        inputs = self._inputs((RATIO * len(key),), pooled_prefix=len(key) - 1, index_n_heads=heads)
        position = torch.full((rows,), RATIO * len(key) - 1)
        inputs = replace(inputs, row_request=torch.zeros_like(position), row_position=position)
        given = {"index_q": {"value": query}, "index_k": {"value": key}, "head_weight": {"value": weight}}
        return self._stage("score", inputs, **given)["value"]

    def index_key(self, pooled: Tensor, norm_weight: Tensor, entry: Tensor) -> Tensor:
        inputs = self._inputs((RATIO * (int(entry.max()) + 1),))
        assert inputs.index is not None
        inputs = replace(inputs, index=replace(inputs.index, norm_weight=norm_weight))
        every = torch.ones(inputs.entry_offset[-1], pooled.shape[1])
        every[entry] = pooled
        return self._stage("index_k", inputs, compressed={"value": every})["value"][entry]

    def pool_in_chunks(self, chunks: Sequence[Tensor], ape: Tensor) -> list[Tensor]:
        return [self._pooled([chunks[: number + 1]], ape)[0] for number in range(len(chunks))]

    def pool_batch(self, requests: Sequence[Tensor], ape: Tensor) -> list[Tensor]:
        return self._pooled([[request] for request in requests], ape)

    def _pooled(self, requests: Sequence[Sequence[Tensor]], ape: Tensor) -> list[Tensor]:
        """Pooled entries of each request, whose tokens arrive in the given chunks."""
        tokens = [torch.cat(list(chunks)) for chunks in requests]
        inputs = self._inputs(tuple(map(len, tokens)), index_head_dim=ape.shape[1], qk_rope_head_dim=2)
        assert inputs.index is not None
        index = replace(inputs.index, kv_score=torch.cat(tokens), ape=ape)
        steps = []
        for number in range(max(map(len, requests))):
            spans = [_span(request, chunks, number) for request, chunks in enumerate(requests) if number < len(chunks)]
            steps.append(tuple(spans))
        packed = self._stage("compressed", replace(inputs, index=index, steps=tuple(steps)))["value"]
        return list(torch.split(packed, list(inputs.entries)))

    def _inputs(self, lengths: tuple[int, ...], pooled_prefix: int = 0, **overrides: Any) -> LayerInputs:
        case = Case(
            "field-report",
            "gaussian",
            lengths,
            rows=len(lengths),
            layers=(LAYER,),
            pooled_prefix=pooled_prefix,
            overrides=SMALL | overrides,
        )
        return generate(case, LAYER)

    def _stage(self, stage: StageName, inputs: LayerInputs, **given: StageTensors) -> StageTensors:
        stages: Any = {
            name: {part: tensor.to(self.device) for part, tensor in parts.items()} for name, parts in given.items()
        }
        trace = Trace("field-report", LAYER, self.path.name, stages)
        made = self.path.stage(stage, inputs.to(self.device), trace)
        return {name: tensor.cpu() for name, tensor in made.items()}


def _span(request: int, chunks: Sequence[Tensor], number: int) -> Span:
    start = sum(map(len, chunks[:number]))
    return Span(request, start, start + len(chunks[number]))
