"""The installed SGLang's own CUDA kernels, operator by operator."""

import json
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from ..reference.inputs import LayerInputs
from ..stages import StageName
from ..trace import StageTensors, Trace
from . import _live_attention, _live_scores, _live_topk
from ._live_build import build_operators
from ._live_compressor import LiveCompressor
from ._live_feed import decode_e4m3, folded_weight, fp8_rows
from ._live_sglang import SGLANG_LIVE, RopeTables, check_dims, live_availability, versions
from .base import Availability, Path

ScoreRoute = Literal["auto", "paged", "nonpaged"]
AttentionRoute = Literal["decode", "prefill"]


def check_option(name: str, value: str, choices: tuple[str, ...]) -> None:
    """ValueError with the choices if `value` is none of them."""
    if value not in choices:
        raise ValueError(f"option {name}={value} is unknown: choose {name}={'|'.join(choices)}")


def variant_name(name: str, options: dict[str, tuple[str, str]]) -> str:
    """`name`, with the options that differ from their default: options maps a name to (value, default)."""
    changed = [f"{option}={value}" for option, (value, default) in options.items() if value != default]
    return f"{name}:{','.join(changed)}" if changed else name


class SglangFp8(Path):
    """SGLang's fp8 index path on a GPU, each operator called as SGLang calls it and fed from the trace.

    Options: `topk=v2|v1|torch` (SGLang's two kernels and its torch fallback), `score=auto|paged|nonpaged` (auto gathers
    the keys where SGLang would), `attention=decode|prefill` (FlashMLA's decode kernel, or dequantise and its prefill
    kernel).
    """

    name = "sglang-fp8"
    says: ClassVar[str] = "the installed SGLang's CUDA kernels, fp8 index keys"
    declares = SGLANG_LIVE

    def __init__(self, topk: str = "v2", score: str = "auto", attention: str = "decode") -> None:
        check_option("topk", topk, get_args(_live_topk.TopK))
        check_option("score", score, get_args(ScoreRoute))
        check_option("attention", attention, get_args(AttentionRoute))
        self.topk_kind: _live_topk.TopK = topk  # type: ignore[assignment]
        self.score_route, self.attention_route = score, attention
        self._tables = RopeTables()
        chosen = {"topk": (topk, "v2"), "score": (score, "auto"), "attention": (attention, "decode")}
        self.name = variant_name(type(self).name, chosen)

    def availability(self) -> Availability:
        return live_availability()

    def stage(self, stage: StageName, inputs: LayerInputs, trace: Trace) -> StageTensors:
        """As `Path.stage`, with the versions that made the tensors among the trace's facts."""
        check_dims(inputs.config, stage)
        build_operators()
        trace.facts.setdefault("versions", versions())
        return super().stage(stage, inputs, trace)

    def table(self, inputs: LayerInputs) -> Tensor:
        return self._tables.table(inputs.config, inputs.kind, max(inputs.lengths), inputs.row_position.device)

    def compressed(self, inputs: LayerInputs, trace: Trace) -> StageTensors:
        return {"value": LiveCompressor(inputs).pool("index")}

    def index_k(self, inputs: LayerInputs, trace: Trace) -> StageTensors:
        """Stored into a poisoned pool with shuffled pages by the plans that made the entries, and read back by slot."""
        layout = _live_scores.index_layout(inputs)
        pool = layout.poisoned(inputs.num_pages, inputs.page_table.device)
        pooled = trace.value("compressed").float()
        LiveCompressor(inputs).store("index", pooled, self.table(inputs), pool, inputs.page_size)
        codes, scale_bytes = layout.read(pool, inputs.entry_slot)
        scale = scale_bytes.contiguous().view(torch.float32)
        return {"value": decode_e4m3(codes) * scale, "codes": codes.contiguous(), "scale": scale, "raw": pool}

    def _query_kernel(self, inputs: LayerInputs, weight: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        """`fused_q_indexer_rope_hadamard_quant`: codes uint8 [R, H, D], and weight * factor * query scale [R, H]."""
        from sglang.kernels.ops.attention.dsv4 import fused_q_indexer_rope_hadamard_quant

        assert inputs.index_query is not None
        codes, folded = fused_q_indexer_rope_hadamard_quant(
            inputs.index_query.contiguous(),
            weight.contiguous(),
            factor,
            self.table(inputs),
            inputs.row_position.to(torch.int32),
        )
        return codes.view(torch.uint8), folded.squeeze(-1)

    def _query_scale(self, inputs: LayerInputs) -> tuple[Tensor, Tensor]:
        """Codes and the query scale [R, H] itself: the kernel with weights of one, so the weight stays checkable."""
        assert inputs.index_weight is not None
        return self._query_kernel(inputs, torch.ones_like(inputs.index_weight), 1.0)

    def index_q(self, inputs: LayerInputs, trace: Trace) -> StageTensors:
        codes, scale = self._query_scale(inputs)
        scale = scale.unsqueeze(-1)
        return {"value": decode_e4m3(codes) * scale, "codes": codes, "scale": scale}

    def head_weight(self, inputs: LayerInputs, trace: Trace) -> StageTensors:
        assert inputs.index_weight is not None
        _, folded = self._query_kernel(inputs, inputs.index_weight, inputs.config.index_scale)
        _, scale = self._query_scale(inputs)
        return {"value": folded / scale, "folded": folded}

    def score(self, inputs: LayerInputs, trace: Trace) -> StageTensors:
        visible = inputs.visible
        if not len(visible) or not int(visible.max()):
            return {"value": torch.empty(len(visible), 0, device=visible.device)}
        pool = _live_scores.key_pages(inputs, *fp8_rows(trace["index_k"], "index_k"))
        query, scale = fp8_rows(trace["index_q"], "index_q")
        weight = folded_weight(trace["head_weight"], scale)
        nonpaged = self.score_route == "nonpaged" or (
            self.score_route == "auto" and _live_scores.takes_nonpaged(inputs)
        )
        trace.facts["score"] = "gather once + fp8_mqa_logits" if nonpaged else "fp8_paged_mqa_logits"
        scores = _live_scores.nonpaged_scores if nonpaged else _live_scores.paged_scores
        return {"value": scores(inputs, query, weight, pool)}

    def topk(self, inputs: LayerInputs, trace: Trace) -> StageTensors:
        entries, slots, branches = _live_topk.select(inputs, trace.value("score").float(), self.topk_kind)
        trace.facts["topk"] = json.dumps({"kernel": self.topk_kind, "rows by branch": branches}, sort_keys=True)
        return {"value": entries, "slots": slots}

    def kv(self, inputs: LayerInputs, trace: Trace) -> StageTensors:
        return _live_attention.latents(inputs, self.table(inputs))

    def attention(self, inputs: LayerInputs, trace: Trace) -> StageTensors:
        attend = _live_attention.decode_attention
        if self.attention_route == "prefill":
            attend = _live_attention.prefill_attention
        trace.facts["attention"] = self.attention_route
        return attend(inputs, trace, self.table(inputs))
