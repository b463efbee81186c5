"""How a layer run reads SGLang's index pool and query: fp8 as SGLang has them, or bf16 as the plugin does."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.layout import read_slots
from ..kernels.query import head_scale
from ..kernels.score import paged_scores
from ..kernels.sglang_plugin.checks import INDEXER_RATIO
from ..reference.inputs import LayerInputs
from ..stages import StageName
from ..trace import StageTensors
from ._live_feed import decode_e4m3
from ._live_scores import index_layout


def index_pages(pool: object) -> Tensor:
    """The whole page rows of the only layer's index pool, uint8 [pages, bytes of a page]."""
    rows: Tensor = pool.index_pools[INDEXER_RATIO].index_k_with_scale_buffer[0]  # type: ignore[attr-defined]
    return rows


@dataclass(frozen=True)
class Fp8Keys:
    """Codes with a scale a key; the query's scale is folded into its head weights, query_scale [R, H] undoes that."""

    query_scale: Tensor
    query_dtype: torch.dtype = torch.uint8

    def stages(
        self, inputs: LayerInputs, pages: Tensor, query: Tensor, folded: Tensor
    ) -> dict[StageName, StageTensors]:
        """Canonical `index_k`, `index_q` and `head_weight` of what the run stored and computed."""
        codes, scale = index_layout(inputs).read(pages, inputs.entry_slot)
        scale, codes = scale.contiguous().view(torch.float32), codes.contiguous()
        factor = self.query_scale.unsqueeze(-1)
        return {
            "index_k": {"value": decode_e4m3(codes) * scale, "codes": codes, "scale": scale, "raw": pages},
            "index_q": {"value": decode_e4m3(query) * factor, "codes": query, "scale": factor},
            "head_weight": {"value": folded / self.query_scale, "folded": folded},
        }


@dataclass(frozen=True)
class Bf16Keys:
    """Bf16 keys and queries; nothing is folded into the head weights."""

    query_dtype: torch.dtype = torch.bfloat16

    def stages(
        self, inputs: LayerInputs, pages: Tensor, query: Tensor, folded: Tensor
    ) -> dict[StageName, StageTensors]:
        """Canonical `index_k`, `index_q` and `head_weight` of what the run stored and computed."""
        return {
            "index_k": {"value": read_slots(pages, inputs.entry_slot).float(), "raw": pages},
            "index_q": {"value": query.float()},
            "head_weight": {"value": folded},
        }

    def scores(self, inputs: LayerInputs, stages: dict[StageName, StageTensors], rows: Tensor) -> Tensor:
        """Scores [r, longest visible] of `rows`, by the kernel alone."""
        assert inputs.index_query is not None and math.isclose(
            inputs.config.index_scale, head_scale(inputs.index_query.shape[1]), rel_tol=1e-9
        )
        return paged_scores(
            stages["index_q"]["value"][rows].to(torch.bfloat16),
            stages["head_weight"]["value"][rows].contiguous(),
            stages["index_k"]["raw"],
            inputs.page_table.to(torch.int32),
            inputs.visible[rows],
            inputs.row_request[rows],
            width=int(inputs.visible.max()),
        )


Keys = Fp8Keys | Bf16Keys
