"""The deepseek path: the published arithmetic with its rounding points."""

from typing import ClassVar, get_args

from torch import Tensor

from ..reference import deepseek_layer
from ..reference.deepseek import FakeQuant
from ..reference.inputs import LayerInputs
from ..trace import StageTensors, Trace
from .base import Declaration, Path, Quantiser, Rounding


def _declaration(latent_format: Quantiser) -> Declaration:
    """The rounding points of `model.py`: bf16 after every step, FP4 on index keys and queries, bf16 scores."""
    return Declaration(
        key=Rounding(pooled="bf16", normed="bf16", rotated="bf16", transformed="bf16", stored="e2m1"),
        query=Rounding(rotated="bf16", transformed="bf16", stored="e2m1"),
        weight="bf16",
        pool="fp32",
        score="bf16",
        score_rounds="bf16",
        window=Rounding(normed="bf16", stored=latent_format),
        latent=Rounding(pooled="bf16", normed="bf16", stored=latent_format),
        rope_tail=Rounding(normed="bf16", rotated="bf16", stored="bf16"),
        attn_query=Rounding(normed="bf16", rotated="bf16", stored="bf16"),
        attention="bf16",
        probability="bf16",
        output="bf16",
    )


class Deepseek(Path):
    """What the model was trained with: `reference.deepseek`, as published.

    kv_fake_quant   `published`: latents stay bf16, since the published fake quantisation is the identity. `intended`:
    they are
                    rounded to e4m3 with a power-of-two scale per 64, as its name says.
    """

    name = "deepseek"
    says: ClassVar[str] = "DeepSeek's published arithmetic: FP4 index keys and queries, bf16 scores"

    def __init__(self, kv_fake_quant: str = "published") -> None:
        if kv_fake_quant not in get_args(FakeQuant):
            raise ValueError(f"kv_fake_quant is {kv_fake_quant!r}: choose {' or '.join(get_args(FakeQuant))}")
        self.fake_quant: FakeQuant = "published" if kv_fake_quant == "published" else "intended"
        self.declares = _declaration("bf16" if self.fake_quant == "published" else "e4m3_pow2")

    def compressed(self, inputs: LayerInputs, trace: Trace) -> StageTensors:
        return _value(deepseek_layer.compressed(inputs))

    def index_k(self, inputs: LayerInputs, trace: Trace) -> StageTensors:
        return _value(deepseek_layer.index_k(inputs, trace.value("compressed")))

    def index_q(self, inputs: LayerInputs, trace: Trace) -> StageTensors:
        return _value(deepseek_layer.index_q(inputs))

    def head_weight(self, inputs: LayerInputs, trace: Trace) -> StageTensors:
        return _value(deepseek_layer.head_weight(inputs))

    def score(self, inputs: LayerInputs, trace: Trace) -> StageTensors:
        keys, queries, weights = (trace.value(stage) for stage in ("index_k", "index_q", "head_weight"))
        return _value(deepseek_layer.score(inputs, keys, queries, weights))

    def topk(self, inputs: LayerInputs, trace: Trace) -> StageTensors:
        return {"value": deepseek_layer.topk(inputs, trace.value("score"))}

    def kv(self, inputs: LayerInputs, trace: Trace) -> StageTensors:
        compressed = deepseek_layer.compressed_latent(inputs, self.fake_quant)
        return {"window": deepseek_layer.window(inputs, self.fake_quant).float(), "compressed": compressed.float()}

    def attention(self, inputs: LayerInputs, trace: Trace) -> StageTensors:
        topk = trace.value("topk") if inputs.kind == "csa" else None
        out, lse = deepseek_layer.attention(inputs, topk, trace["kv"]["window"], trace["kv"]["compressed"])
        return {"value": out.float(), "lse": lse}


def _value(tensor: Tensor) -> StageTensors:
    return {"value": tensor.float()}
