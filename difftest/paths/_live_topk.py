"""SGLang's top-k kernels, and which branch of top-k v2 a row takes."""

from collections import Counter
from typing import Literal

import torch
from torch import Tensor

from ..reference.inputs import LayerInputs
from ._live_scores import row_page_table

TopK = Literal["v1", "v2", "torch"]
STRIDE = 256
"""Columns that score rows are padded to; v2 loads 16 bytes at a time and DeepGEMM aligns its rows the same way."""
POISON = torch.finfo(torch.float32).max
"""Score of columns past a row's visible entries: a kernel that reads them selects them."""

REGISTER2_MAX, REGISTER4_MAX = 8192, 16384
SMALL_BATCH = 15
CLUSTER_FLOOR = {9: (32768, 65536), 10: (24576, 30720)}
"""Longest row that one block handles, by compute capability: (at most SMALL_BATCH rows, more rows)."""
CLUSTER_MAX_BATCH = 512
PERSISTENT_CLUSTERS = {9: 30, 10: 33}
"""Rows up to which each row has its own cluster, where the occupancy probe finds what SGLang's authors measured."""


def select(inputs: LayerInputs, score: Tensor, kind: TopK) -> tuple[Tensor, Tensor, dict[str, int]]:
    """Entries and pool slots of each row's k best scores, int32 [R, k], and how many rows took which branch.

    score fp32 [R, max visible]; columns past a row's visible entries are overwritten with POISON on the way.
    """
    lengths = inputs.visible.to(torch.int32)
    padded = _padded(score, lengths, inputs.page_table.shape[1] * inputs.page_size)
    table, k = row_page_table(inputs), inputs.config.index_topk
    slots = torch.full((len(lengths), k), -2, dtype=torch.int32, device=score.device)
    entries = torch.full_like(slots, -2)
    threshold = None
    if kind == "v1":
        from sglang.kernels.ops.attention.dsv4 import topk_transform_paged

        topk_transform_paged(padded, lengths, table, slots, inputs.page_size, entries)
    elif kind == "v2":
        from sglang.kernels.ops.attention.dsv4 import plan_topk_v2, topk_transform_paged_v2

        plan = plan_topk_v2(lengths)
        topk_transform_paged_v2(padded, lengths, table, slots, inputs.page_size, plan, entries)
        threshold = plan[0, 0]
    else:
        from sglang.srt.layers.attention.dsv4.indexer import topk_transform_pytorch_vectorized

        topk_transform_pytorch_vectorized(padded, lengths, table, slots, inputs.page_size, entries)
    return entries, slots, _branches(inputs, padded.shape[1], kind, threshold)


def _padded(score: Tensor, lengths: Tensor, width: int) -> Tensor:
    """[R, width] with a row stride that is a multiple of STRIDE; everything past a row's length is POISON."""
    whole = torch.full((len(score), -(-width // STRIDE) * STRIDE), POISON, device=score.device)
    whole[:, : score.shape[1]] = score
    entry = torch.arange(whole.shape[1], device=score.device)
    return whole.masked_fill_(entry >= lengths.unsqueeze(1), POISON)[:, :width]


def _branches(inputs: LayerInputs, width: int, kind: TopK, threshold: Tensor | None) -> dict[str, int]:
    k, lengths = inputs.config.index_topk, inputs.visible.tolist()
    if kind != "v2":
        return dict(Counter("trivial" if length <= k else kind for length in lengths))
    major = torch.cuda.get_device_capability()[0]
    planned = int(threshold) if threshold is not None and len(lengths) > PERSISTENT_CLUSTERS.get(major, 0) else None
    return dict(Counter(v2_branch(length, k, len(lengths), width, major, planned) for length in lengths))


def v2_branch(length: int, k: int, rows: int, width: int, major: int, planned: int | None = None) -> str:
    """Branch of top-k v2 that a row of `length` entries takes, among `rows` rows of `width` columns.

    `planned` is the threshold that SGLang's plan chose, for batches too large for a cluster a row. Source: `launch` and
    `topk_main_kernel` in SGLang 0.5.23's `topk_v2.cuh`.
    """
    if length <= k:
        return "trivial"
    small, large = CLUSTER_FLOOR.get(major, (1 << 31, 1 << 31))
    floor = small if rows <= SMALL_BATCH else large
    if width <= floor or rows > CLUSTER_MAX_BATCH:
        if width <= REGISTER2_MAX:
            return "register2"
        return "register4" if length <= REGISTER4_MAX else "streaming"
    if length <= REGISTER4_MAX:
        return "register4"
    threshold = floor if planned is None else planned
    return "streaming" if length <= threshold else "cluster"
