"""DeepGEMM's fp8 index scores: over the paged cache, or over keys gathered once."""

import math
from types import SimpleNamespace

import torch
from torch import Tensor

from ..reference.inputs import LayerInputs
from .planar_pages import PlanarPages

SCALE_BYTES = 4
NONPAGED_ROWS = 8192
"""Query rows from which SGLang gathers a single request's keys once; its own default."""


def index_layout(inputs: LayerInputs) -> PlanarPages:
    """64 entries of 128 codes, then 64 fp32 scales: 8,448 bytes a page."""
    return PlanarPages(inputs.page_size, inputs.config.index_head_dim, SCALE_BYTES)


def key_pages(inputs: LayerInputs, codes: Tensor, scale: Tensor) -> Tensor:
    """A poisoned pool with every entry at its slot: codes uint8 [E, D], scale fp32 [E] -> uint8 [pages, page bytes]."""
    layout = index_layout(inputs)
    pool = layout.poisoned(inputs.num_pages, codes.device)
    layout.write(pool, inputs.entry_slot, codes, scale.contiguous().view(torch.uint8).view(-1, SCALE_BYTES))
    return pool


def row_page_table(inputs: LayerInputs) -> Tensor:
    """int32 [R, pages]: every row's page table; unused columns name page 0, which is a valid page that nobody reads."""
    return inputs.page_table[inputs.row_request].clamp_min(0).to(torch.int32).contiguous()


def takes_nonpaged(inputs: LayerInputs) -> bool:
    """Whether SGLang would gather the keys: one request, a prefill, and at least NONPAGED_ROWS query rows."""
    return len(inputs.lengths) == 1 and len(inputs.steps) == 1 and len(inputs.row_position) >= NONPAGED_ROWS


def mask(score: Tensor, visible: Tensor) -> Tensor:
    """[R, max visible] fp32: -inf past each row's visible entries, where the kernels leave whatever memory held."""
    width = int(visible.max()) if len(visible) else 0
    entry = torch.arange(width, device=score.device)
    return score[:, :width].masked_fill(entry >= visible.unsqueeze(1), -math.inf).contiguous()


def paged_scores(inputs: LayerInputs, query: Tensor, weight: Tensor, pool: Tensor) -> Tensor:
    """`fp8_paged_mqa_logits` over the pool: query uint8 codes [R, H, D], weight fp32 [R, H] -> masked scores."""
    import tvm_ffi  # noqa: F401  deep_gemm links against it
    import deep_gemm  # isort: skip

    visible, table = inputs.visible, row_page_table(inputs)
    context = visible.to(torch.int32).unsqueeze(1).contiguous()
    schedule = deep_gemm.get_paged_mqa_logits_metadata(context, inputs.page_size, deep_gemm.get_num_sms())
    score: Tensor = deep_gemm.fp8_paged_mqa_logits(
        query.contiguous().view(torch.float8_e4m3fn).unsqueeze(1),
        pool.view(len(pool), inputs.page_size, 1, inputs.config.index_head_dim + SCALE_BYTES),
        weight,
        context,
        table,
        schedule,
        table.shape[1] * inputs.page_size,
        False,
    )
    return mask(score, visible)


def nonpaged_scores(inputs: LayerInputs, query: Tensor, weight: Tensor, pool: Tensor) -> Tensor:
    """Keys gathered once a request by SGLang's own kernel, then `fp8_mqa_logits`; same arguments and result as paged.

    SGLang gives rows of at most k visible entries an empty range, since its top-k never reads them; here they get their
    range too, so that every score is compared.
    """
    import tvm_ffi  # noqa: F401  deep_gemm links against it
    import deep_gemm  # isort: skip

    visible = inputs.visible
    width = int(visible.max())
    out = torch.full((len(visible), width), -math.inf, device=pool.device)
    for request in range(len(inputs.lengths)):
        rows = (inputs.row_request == request).nonzero().squeeze(1)
        count = int(visible[rows].max()) if len(rows) else 0
        if not count:
            continue
        end = visible[rows].to(torch.int32).contiguous()
        padded = -(-count // inputs.page_size) * inputs.page_size
        score = deep_gemm.fp8_mqa_logits(
            query[rows].contiguous().view(torch.float8_e4m3fn),
            gather_keys(inputs, pool, request, count),
            weight[rows].contiguous(),
            torch.zeros_like(end),
            end,
            clean_logits=False,
            max_seqlen_k=padded,
        )
        out[rows, :count] = mask(score, visible[rows])
    return out


def gather_keys(inputs: LayerInputs, pool: Tensor, request: int, count: int) -> tuple[Tensor, Tensor]:
    """The first `count` keys of a request by SGLang's gather kernel: e4m3 [count, D] and scales fp32 [count]."""
    from sglang.kernels.ops.kvcache.dsa_index_k_cache import GetKAndS

    shape = SimpleNamespace(
        index_page_size=inputs.page_size,
        index_head_dim=inputs.config.index_head_dim,
        quant_block_size=inputs.config.index_head_dim,
    )
    codes, scale = GetKAndS.execute(
        shape,
        pool,
        page_indices=inputs.page_table[request : request + 1].clamp_min(0).to(torch.int32).contiguous(),
        seq_len_tensor=torch.tensor([count], dtype=torch.int32, device=pool.device),
        seq_len_sum=count,
        max_seq_len=count,
    )
    return codes.view(torch.float8_e4m3fn), scale.view(torch.float32).squeeze(-1)
