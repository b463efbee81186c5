"""The oracle path: every stage in fp64, stored as fp32."""

from typing import ClassVar

import torch
from torch import Tensor

from ..reference import oracle
from ..reference.inputs import LayerInputs
from ..trace import StageTensors, Trace
from .base import Declaration, Path


class Oracle(Path):
    """The truth: `reference.oracle`, each stage computed in fp64 from upstream tensors and rounded once, to fp32."""

    name = "oracle"
    says: ClassVar[str] = "exact mathematics in fp64 on unquantised inputs"
    declares = Declaration(pool="fp64", score="fp64", attention="fp64")

    def compressed(self, inputs: LayerInputs, trace: Trace) -> StageTensors:
        return _value(oracle.compressed(inputs))

    def index_k(self, inputs: LayerInputs, trace: Trace) -> StageTensors:
        return _value(oracle.index_k(inputs, trace.value("compressed")))

    def index_q(self, inputs: LayerInputs, trace: Trace) -> StageTensors:
        return _value(oracle.index_q(inputs))

    def head_weight(self, inputs: LayerInputs, trace: Trace) -> StageTensors:
        return _value(oracle.head_weight(inputs))

    def score(self, inputs: LayerInputs, trace: Trace) -> StageTensors:
        keys, queries, weights = (trace.value(stage) for stage in ("index_k", "index_q", "head_weight"))
        return _value(oracle.score(inputs, keys, queries, weights))

    def topk(self, inputs: LayerInputs, trace: Trace) -> StageTensors:
        return {"value": oracle.topk(inputs, trace.value("score"))}

    def kv(self, inputs: LayerInputs, trace: Trace) -> StageTensors:
        compressed = oracle.compressed_latent(inputs, dtype=torch.float32)
        return {"window": oracle.window(inputs).float(), "compressed": compressed}

    def attention(self, inputs: LayerInputs, trace: Trace) -> StageTensors:
        topk = trace.value("topk") if inputs.kind == "csa" else None
        out, lse = oracle.attention(inputs, topk, trace["kv"]["window"], trace["kv"]["compressed"])
        return {"value": out.float(), "lse": lse.float()}


def _value(tensor: Tensor) -> StageTensors:
    return {"value": tensor.float()}
