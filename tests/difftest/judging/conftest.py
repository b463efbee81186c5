"""A small layer and a path in plain torch fp32 that follows any `Declaration`, with a hook at every step for faults."""

import math
from collections.abc import Callable
from typing import ClassVar

import pytest
import torch
from difftest.cases.case import Case
from difftest.cases.generate import generate
from difftest.reference.inputs import CompressorInputs, LayerInputs
from difftest.reference.rope import rope_table
from torch import Tensor

from difftest.isolated import check_isolated
from difftest.paths.base import Declaration, Path, Rounding
from difftest.record import Record
from difftest.stages import StageName, stages_of
from difftest.trace import StageTensors, Trace

LAYER = {"swa": 0, "csa": 2, "hca": 3}
SMALL = {"index_n_heads": 6, "num_attention_heads": 4, "head_dim": 128, "index_topk": 16, "sliding_window": 24}

Hook = Callable[[Tensor], Tensor]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def small_inputs(
    kind: str = "csa", seed: int = 0, lengths: tuple[int, ...] = (271, 183, 45), **fields: object
) -> LayerInputs:
    """Inputs of a small Gaussian layer: 6 index heads, 4 attention heads of width 128, k = 16."""
    fields.setdefault("rows", 10)
    fields.setdefault("overrides", SMALL)
    case = Case(f"judging-{kind}", "gaussian", lengths, base_seed=seed, **fields)  # type: ignore[arg-type]
    return generate(case, LAYER[kind])


def bf16(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def rounded(x: Tensor, declared: str) -> Tensor:
    return bf16(x) if declared == "bf16" else x


class ModelPath(Path):
    """Every stage in fp32, rounded where declared. `hooks` change a step: {"normed": lambda x: ...} plants a fault."""

    name = "model"
    says: ClassVar[str] = "test path"

    def __init__(self, declares: Declaration, **hooks: Hook) -> None:
        self.declares, self.hooks = declares, hooks

    def at(self, step: str, x: Tensor) -> Tensor:
        return self.hooks[step](x) if step in self.hooks else x

    # compressors

    def pool(self, inputs: LayerInputs, part: CompressorInputs) -> Tensor:
        ape, ratio, pieces = part.ape, inputs.ratio, []
        for request, count in enumerate(inputs.entries):
            rows = part.kv_score[inputs.token_offset[request] : inputs.token_offset[request + 1]][: count * ratio]
            blocks = rows.unflatten(0, (-1, ratio))
            dim = ape.shape[1]
            if ratio == 4:
                kv, gate = blocks[..., dim : 2 * dim], blocks[..., 3 * dim :] + ape[4:]
                before_kv = torch.cat((torch.zeros(1, 4, dim), blocks[:-1, :, :dim]))
                before_gate = torch.cat(
                    (torch.full((1, 4, dim), -math.inf), blocks[:-1, :, 2 * dim : 3 * dim] + ape[:4])
                )
                kv, gate = torch.cat((before_kv, kv), 1), torch.cat((before_gate, gate), 1)
            else:
                kv, gate = blocks[..., :dim], blocks[..., dim:] + ape
            pieces.append((kv * self.at("gate", gate).softmax(1)).sum(1))
        return self.at("pooled", torch.cat(pieces))

    def compressed(self, inputs: LayerInputs, trace: Trace) -> StageTensors:
        assert inputs.index is not None
        return {"value": self.pool(inputs, inputs.index)}

    # keys and queries

    def norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        normed = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
        return normed if weight is None else normed * self.at("norm_weight", weight)

    def rotate(self, inputs: LayerInputs, x: Tensor, position: Tensor) -> Tensor:
        table = rope_table(inputs.config, inputs.kind, self.at("position", position)).to(torch.complex64)
        table = table.reshape(len(table), *(1,) * (x.ndim - 2), -1)
        pairs = torch.view_as_complex(x[..., -64:].unflatten(-1, (-1, 2)).contiguous()) * table
        return torch.cat((x[..., :-64], torch.view_as_real(pairs).flatten(-2)), -1)

    def hadamard(self, x: Tensor) -> Tensor:
        if "hadamard" in self.hooks:
            return self.hooks["hadamard"](x)
        half = 1
        while half < x.shape[-1]:
            low, high = x.unflatten(-1, (-1, 2, half)).unbind(-2)
            x = torch.stack((low + high, low - high), -2).flatten(-3)
            half *= 2
        return x * x.shape[-1] ** -0.5

    def store(self, x: Tensor, stored: str) -> StageTensors:
        if stored in ("none", "bf16"):
            return {"value": self.at("stored", rounded(x, stored))}
        block = {"e4m3": 128, "e4m3_pow2": 64, "e2m1": 32}[stored]
        largest, floor = (6.0, 6 * 2.0**-126) if stored == "e2m1" else (448.0, 1e-4)
        blocks = x.unflatten(-1, (-1, min(block, x.shape[-1])))
        scale = blocks.abs().amax(-1, keepdim=True).clamp(min=floor) / largest
        if stored != "e4m3":
            scale = torch.exp2(scale.log2().ceil())
        scale = self.at("scale", scale)
        codes = self.at("codes", (blocks * (1 / scale)).clamp(-largest, largest))
        if stored == "e2m1":
            step = torch.where(codes.abs() < 2, 0.5, torch.where(codes.abs() < 4, 1.0, 2.0))
            codes = (codes / step).round() * step
            return {"value": self.at("stored", (codes * scale).flatten(-2)), "scale": scale.squeeze(-1)}
        bits = codes.to(torch.float8_e4m3fn)
        return {
            "value": self.at("stored", (bits.float() * scale).flatten(-2)),
            "codes": self.at("bytes", bits.view(torch.uint8).flatten(-2)),
            "scale": scale.squeeze(-1),
        }

    def prepared(self, inputs: LayerInputs, x: Tensor, position: Tensor, declared: Rounding) -> StageTensors:
        turned = rounded(self.at("rotated", self.rotate(inputs, x, position)), declared.rotated)
        return self.store(rounded(self.at("transformed", self.hadamard(turned)), declared.transformed), declared.stored)

    def index_k(self, inputs: LayerInputs, trace: Trace) -> StageTensors:
        assert inputs.index is not None
        pooled = rounded(trace.value("compressed"), self.declares.key.pooled)
        normed = self.norm(pooled, inputs.index.norm_weight, inputs.config.rms_norm_eps)
        normed = rounded(self.at("normed", normed), self.declares.key.normed)
        return self.prepared(inputs, normed, inputs.entry_position, self.declares.key)

    def index_q(self, inputs: LayerInputs, trace: Trace) -> StageTensors:
        assert inputs.index_query is not None
        return self.prepared(inputs, inputs.index_query.float(), inputs.row_position, self.declares.query)

    def head_weight(self, inputs: LayerInputs, trace: Trace) -> StageTensors:
        assert inputs.index_weight is not None
        weight = inputs.index_weight.float() * inputs.config.index_scale
        return {"value": self.at("weight", rounded(weight, self.declares.weight))}

    # scores and selection

    def score(self, inputs: LayerInputs, trace: Trace) -> StageTensors:
        q, k, w = (trace.value(stage) for stage in ("index_q", "index_k", "head_weight"))
        q, k, w = self.at("score_q", q), self.at("score_k", k), self.at("score_w", w)
        visible = inputs.visible
        out = torch.full((len(visible), int(visible.max())), -math.inf)
        for row, count in enumerate(visible.tolist()):
            first = inputs.entry_offset[int(inputs.row_request[row])]
            dots = self.at("dots", rounded(q[row] @ k[first : first + count].T, self.declares.score_rounds))
            terms = self.at(
                "terms", rounded(self.hooks.get("relu", torch.relu)(dots) * w[row][:, None], self.declares.score_rounds)
            )
            out[row, :count] = self.at("score", rounded(terms.sum(0), self.declares.score_rounds))
        return {"value": self.at("scores", out)}

    def topk(self, inputs: LayerInputs, trace: Trace) -> StageTensors:
        score, k = trace.value("score"), inputs.config.index_topk
        out = torch.full((len(score), k), -1, dtype=torch.int32)
        for row, count in enumerate(inputs.visible.tolist()):
            best = score[row, :count].topk(min(k, count)).indices
            out[row, : len(best)] = best.int()
        return {"value": self.at("topk", out)}

    # latents and attention

    def latent(self, inputs: LayerInputs, x: Tensor, weight: Tensor, position: Tensor, declared: Rounding) -> Tensor:
        tail = self.declares.rope_tail
        normed = self.norm(rounded(x, declared.pooled), weight, inputs.config.rms_norm_eps)
        nope = self.at("nope", rounded(normed[..., :-64], declared.normed))
        turned = self.rotate(inputs, rounded(normed, tail.normed), position)[..., -64:]
        stored = self.store(nope, declared.stored)["value"]
        return torch.cat((stored, rounded(self.at("tail", rounded(turned, tail.rotated)), tail.stored)), -1)

    def kv(self, inputs: LayerInputs, trace: Trace) -> StageTensors:
        near = self.latent(
            inputs, inputs.window_kv.float(), inputs.kv_norm_weight, inputs.window_position, self.declares.window
        )
        far = torch.zeros(0, inputs.config.head_dim)
        if inputs.main is not None:
            pooled, weight = self.pool(inputs, inputs.main), inputs.main.norm_weight
            far = self.latent(inputs, pooled, weight, inputs.entry_position, self.declares.latent)
        return {"window": self.at("window", near), "compressed": self.at("latents", far)}

    def attention_query(self, inputs: LayerInputs) -> Tensor:
        declared = self.declares.attn_query
        normed = rounded(self.norm(inputs.attn_query.float(), None, inputs.config.rms_norm_eps), declared.normed)
        return self.at("query", rounded(self.rotate(inputs, normed, inputs.row_position), declared.rotated))

    def entries(self, inputs: LayerInputs, trace: Trace) -> Tensor:
        visible = inputs.visible
        if inputs.kind == "csa":
            chosen = trace.value("topk").long()
        else:
            every = torch.arange(int(visible.max())).expand(len(visible), -1)
            chosen = torch.where(every < visible[:, None], every, -1)
        return self.at("entries", chosen)

    def attention(self, inputs: LayerInputs, trace: Trace) -> StageTensors:
        query, chosen, kv = self.attention_query(inputs), self.entries(inputs, trace), trace["kv"]
        offset = torch.tensor(inputs.entry_offset)[inputs.row_request]
        outs, sums = [], []
        for row in range(len(query)):
            near, far = self.at("near", inputs.window_index[row]), chosen[row]
            keys = torch.cat((kv["window"][near[near >= 0]], kv["compressed"][far[far >= 0] + offset[row]]))
            logit = self.at("logit", query[row] @ keys.T * inputs.config.softmax_scale)
            top = logit.amax(-1, keepdim=True)
            p = (logit - top).exp()
            total = p.sum(-1, keepdim=True)
            sink = (self.at("sink", inputs.attn_sink)[:, None] - top).exp()
            p = rounded(self.at("probability", p), self.declares.probability)
            outs.append(rounded(p @ keys / (total + sink), self.declares.output))
            sums.append((total.log() + top)[:, 0])
        return {"value": self.at("out", torch.stack(outs)), "lse": self.at("lse", torch.stack(sums))}


FP32 = Declaration()
FP8 = Declaration(
    key=Rounding(stored="e4m3"),
    query=Rounding(stored="e4m3"),
    window=Rounding(stored="e4m3_pow2"),
    latent=Rounding(normed="bf16", stored="e4m3_pow2"),
    rope_tail=Rounding(stored="bf16"),
    attn_query=Rounding(normed="bf16", rotated="bf16"),
    probability="bf16",
    output="bf16",
)
PUBLISHED = Declaration(
    key=Rounding(pooled="bf16", normed="bf16", rotated="bf16", transformed="bf16", stored="e2m1"),
    query=Rounding(rotated="bf16", transformed="bf16", stored="e2m1"),
    weight="bf16",
    score="bf16",
    score_rounds="bf16",
    window=Rounding(normed="bf16", stored="bf16"),
    latent=Rounding(pooled="bf16", normed="bf16", stored="bf16"),
    rope_tail=Rounding(normed="bf16", rotated="bf16", stored="bf16"),
    attn_query=Rounding(normed="bf16", rotated="bf16"),
    probability="bf16",
    output="bf16",
)
BF16 = Declaration(
    key=Rounding(stored="bf16"),
    query=Rounding(stored="bf16"),
    window=Rounding(stored="bf16"),
    latent=Rounding(stored="bf16"),
    rope_tail=Rounding(stored="bf16"),
    attn_query=Rounding(rotated="bf16"),
)
DECLARATIONS = {"fp32": FP32, "fp8": FP8, "published": PUBLISHED, "bf16": BF16}


class Bench:
    """What the judging tests need: inputs, traces and isolated records, each made once for a session."""

    model = ModelPath
    declarations = DECLARATIONS
    inputs = staticmethod(small_inputs)
    bf16 = staticmethod(bf16)

    def __init__(self) -> None:
        self._inputs: dict[str, LayerInputs] = {}
        self._clean: dict[tuple[str, str], Trace] = {}

    def layer(self, kind: str = "csa") -> LayerInputs:
        if kind not in self._inputs:
            self._inputs[kind] = small_inputs(kind)
        return self._inputs[kind]

    def clean(self, declares: str, kind: str = "csa") -> Trace:
        """The faultless trace of one declaration on the shared layer."""
        if (declares, kind) not in self._clean:
            self._clean[declares, kind] = ModelPath(DECLARATIONS[declares]).run(self.layer(kind), "small")
        return self._clean[declares, kind]

    def check(self, stage: StageName, declares: str, kind: str = "csa", **hooks: Hook) -> Record:
        """Isolated record of one stage, recomputed with faults on faultless upstream stages."""
        inputs, path = self.layer(kind), ModelPath(DECLARATIONS[declares], **hooks)
        clean = self.clean(declares, kind)
        trace = Trace("small", inputs.layer, path.name, dict(clean.stages))
        trace.stages[stage] = path.stage(stage, inputs, trace)
        return check_isolated(stage, inputs, trace, path.declares)

    def records(self, inputs: LayerInputs, declares: str) -> list[Record]:
        """Isolated records of every stage of a faultless path."""
        path = ModelPath(DECLARATIONS[declares])
        trace = path.run(inputs, "small")
        return [check_isolated(stage, inputs, trace, path.declares) for stage in stages_of(inputs.kind)]


@pytest.fixture(scope="session")
def bench() -> Bench:
    return Bench()
