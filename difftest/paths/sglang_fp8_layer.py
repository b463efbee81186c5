"""A whole layer through SGLang's own attention backend and token pool, beside the operator-level path."""

from contextlib import ExitStack
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from ..reference.inputs import LayerInputs
from ..stages import STAGES, StageName, stages_of
from ..trace import StageTensors, Trace
from ._layer_keys import Fp8Keys, Keys
from ._live_build import build_operators
from ._live_sglang import check_dims, versions
from ._live_topk import TopK
from .base import CannotFeed
from .sglang_fp8 import SglangFp8, check_option, variant_name

LayerAttention = Literal["auto", "decode", "prefill"]
LayerGraph = Literal["off", "on"]
GATHERED = "score: gathered"


class SglangFp8Layer(SglangFp8):
    """SGLang's `DeepseekV4AttnBackend`, `DeepSeekV4TokenToKVPool` and `forward_c4_indexer`, driven as by its model.

    The layer runs as one: its stages come from one run, so that a substituted upstream stage raises CannotFeed.
    Options: `topk=v2|v1|torch`, `attention=auto|decode|prefill` (auto: SGLang's choice, its prefill route for
    prefill steps), and `graph=off|on` (on: decode steps after the first replay the indexer as a CUDA graph).
    """

    name = "sglang-fp8-layer"
    says: ClassVar[str] = "SGLang's attention backend, token pool and indexer, layer by layer"

    def __init__(self, topk: str = "v2", attention: str = "auto", graph: str = "off") -> None:
        super().__init__()
        check_option("topk", topk, get_args(TopK))
        check_option("attention", attention, get_args(LayerAttention))
        check_option("graph", graph, get_args(LayerGraph))
        self.topk_option, self.attention_option, self.graph_option = topk, attention, graph
        chosen = {"topk": (topk, "v2"), "attention": (attention, "auto"), "graph": (graph, "off")}
        self.name = variant_name(type(self).name, chosen)
        self._last: tuple[LayerInputs, dict[StageName, StageTensors], str] | None = None

    def stage(self, stage: StageName, inputs: LayerInputs, trace: Trace) -> StageTensors:
        """The stage's tensors from the run over `inputs`, which is made when the first stage is asked for."""
        for needed in stages_of(inputs.kind):
            check_dims(inputs.config, needed)
        build_operators()
        stages, routes = self._run_once(inputs)
        for upstream in STAGES[stage].reads:
            if upstream in trace and not _same(trace[upstream], stages[upstream]):
                raise CannotFeed(
                    f"stage {stage} of {self.name} is computed inside SGLang's backend and takes no other {upstream}; "
                    "substitute into sglang-fp8 instead"
                )
        trace.facts.setdefault("versions", versions())
        trace.facts["routes"] = routes
        return stages[stage]

    def _run_once(self, inputs: LayerInputs) -> tuple[dict[StageName, StageTensors], str]:
        if self._last is None or self._last[0] is not inputs:
            self._last = None  # free the other layer's pools first
            stages, routes = self._run_layer(inputs)
            self._last = (inputs, stages, routes)
        return self._last[1], self._last[2]

    def _run_layer(self, inputs: LayerInputs) -> tuple[dict[StageName, StageTensors], str]:
        from sglang.srt.environ import envs

        from ._layer_run import LayerRun

        with ExitStack() as stack:
            stack.enter_context(envs.SGLANG_OPT_USE_TOPK_V2.override(self.topk_option != "v1"))
            if self.attention_option != "auto":
                wanted = self.attention_option == "prefill"
                stack.enter_context(envs.SGLANG_OPT_FLASHMLA_SPARSE_PREFILL.override(wanted))
            graphs = self.graph_option == "on"
            run = LayerRun.start(inputs, self.table(inputs), self.topk_option, self._keys(inputs), graphs)
            run.run()
        stages = run.stages()
        if GATHERED in run.routes:
            self._fill_unscored_rows(inputs, stages)
        return stages, ", ".join(sorted(run.routes))

    def _keys(self, inputs: LayerInputs) -> Keys:
        return Fp8Keys(self._query_scale(inputs)[1] if inputs.kind == "csa" else torch.empty(0))

    def _fill_unscored_rows(self, inputs: LayerInputs, stages: dict[StageName, StageTensors]) -> None:
        """Scores rows of at most k entries by operator: with gathered keys SGLang leaves those to memory, unread."""
        operators = SglangFp8(score="nonpaged").score(inputs, Trace("", inputs.layer, self.name, dict(stages)))["value"]
        trivial = inputs.visible <= inputs.config.index_topk
        stages["score"]["value"][trivial] = operators[trivial]


def _same(given: StageTensors, own: StageTensors) -> bool:
    return given is own or all(
        name in given and torch.equal(_plain(given[name]), _plain(tensor))
        for name, tensor in own.items()
        if name in ("value", "window", "compressed")
    )


def _plain(tensor: Tensor) -> Tensor:
    return tensor.nan_to_num() if tensor.is_floating_point() else tensor
