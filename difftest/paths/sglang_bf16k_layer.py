"""The layer level of SGLang with the bf16 index-K plugin switched on."""

from dataclasses import replace
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from ..kernels.sglang_plugin.checks import Unsupported, check_device, check_version
from ..kernels.sglang_plugin.install import register
from ..kernels.sglang_plugin.switch import switched
from ..kernels.sglang_plugin.targets import BF16_TARGETS
from ..reference.inputs import LayerInputs
from ..stages import StageName
from ..trace import StageTensors
from ._layer_keys import Bf16Keys, Keys
from ._live_sglang import SGLANG_LIVE, live_availability
from .base import Availability, Rounding
from .sglang_fp8_layer import SglangFp8Layer


class SglangBf16KLayer(SglangFp8Layer):
    """`sglang-fp8-layer` with the plugin's hooks installed by SGLang's own registry and switched on for the run.

    The hooks stay installed and off afterwards, so that both paths run in one process. Options as `sglang-fp8-layer`.
    """

    name = "sglang-bf16k-layer"
    says: ClassVar[str] = "SGLang's backend, pool and indexer with the bf16 index-K plugin, layer by layer"
    declares = replace(
        SGLANG_LIVE,
        key=Rounding(stored="bf16"),
        query=Rounding(stored="bf16"),
        weight="none",
        score="fp32",
        score_rounds="none",
    )

    def availability(self) -> Availability:
        live = live_availability()
        if not live.ok:
            return live
        try:
            check_version()
            check_device()
        except Unsupported as error:
            return Availability(False, str(error))
        return Availability(True)

    def _run_layer(self, inputs: LayerInputs) -> tuple[dict[StageName, StageTensors], str]:
        install_hooks()
        with switched(True):
            return super()._run_layer(inputs)

    def _keys(self, inputs: LayerInputs) -> Keys:
        return Bf16Keys()

    def _fill_unscored_rows(self, inputs: LayerInputs, stages: dict[StageName, StageTensors]) -> None:
        """Scores rows of at most k entries by kernel: with gathered keys SGLang leaves those to memory, unread."""
        rows: Tensor = (inputs.visible <= inputs.config.index_topk).nonzero().squeeze(1)
        if len(rows):
            score = stages["score"]["value"]
            score[rows] = Bf16Keys().scores(inputs, stages, rows)[:, : score.shape[1]].to(torch.float32)


@cache
def install_hooks() -> None:
    """Registers the plugin's hooks and has SGLang apply them, once a process; they do nothing until switched on."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    register(BF16_TARGETS)
    HookRegistry.apply_hooks()
