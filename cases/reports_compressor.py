"""Field reports about the compressor and its state: C2, C4, C5."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..reference.compressor import Compressor, pool
from ..reference.indexer import score, select
from .field_report import Component, Fault, FieldReport, Violation, draw, wrong_rows

RATIO = 4
SLOTS = 2 * RATIO
DIM = 16
"""Narrow entries: these faults do not depend on the width."""

POOL_SLACK = 2.0**-6
"""Relative error of a pooled row: a bf16 state rounds kv by at most 2^-8 and a gate of up to 2 by as much, and a bf16
output once more."""


def _tokens(report: str, name: str, count: int) -> Tensor:
    return draw(report).normal(name, count, 4 * DIM)


def _ape(report: str) -> Tensor:
    return draw(report).normal("ape", SLOTS, DIM) * 0.5


def _labels(prefix: str, count: int) -> list[str]:
    return [f"{prefix}entry {entry}" for entry in range(count)]


# ---------------------------------------------------------------------------------------------- C2: chunks

CHUNKS = (16, 16, 10)


def _check_chunks(pool_in_chunks: Component) -> list[Violation]:
    tokens, ape = _tokens("c2", "tokens", sum(CHUNKS)), _ape("c2")
    best = 1
    tokens[best * RATIO : (best + 1) * RATIO, DIM : 2 * DIM] = 9.0  # entry 1 is by far the best for a query of ones
    tokens[:RATIO, :DIM] = 9.0
    whole = pool(tokens, ape, RATIO)
    found = []
    seen = 0
    for number, entries in enumerate(pool_in_chunks(list(torch.split(tokens, list(CHUNKS))), ape)):
        seen += CHUNKS[number]
        label = f"after chunk {number}: "
        if len(entries) != seen // RATIO:
            found.append(Violation("entries so far", f"{label}{len(entries)} entries, must be {seen // RATIO}"))
            continue
        found += wrong_rows("equals one prefill", entries, whole[: seen // RATIO], POOL_SLACK, _labels(label, seen))
    ones = torch.ones(1, 1, DIM)
    last = score(ones, entries, ones[:, :, 0])
    picks = select(last, torch.tensor([len(entries)]), 2)[0].tolist()
    if best not in picks:
        found.append(Violation("old entry selectable", f"entry {best} is the best and {picks} are selected"))
    return found


def _stateful(chunks: Sequence[Tensor], ape: Tensor) -> list[Tensor]:
    compressor = Compressor(ape, RATIO, ape.shape[1])
    entries = torch.empty(0, ape.shape[1], dtype=torch.float64)
    out = []
    for chunk in chunks:
        entries = torch.cat((entries, compressor.feed(chunk)))
        out.append(entries)
    return out


def _current_chunk_only(chunks: Sequence[Tensor], ape: Tensor) -> list[Tensor]:
    """The indexer's keys are those of the current call."""
    return [pool(chunk, ape, RATIO) for chunk in chunks]


def _bias_restarts(chunks: Sequence[Tensor], ape: Tensor) -> list[Tensor]:
    """Each chunk is pooled as if it began a request: no overlap, and blocks counted from the chunk's start."""
    out: list[Tensor] = []
    for chunk in chunks:
        out.append(torch.cat([*out[-1:], pool(chunk, ape, RATIO)]))
    return out


# ---------------------------------------------------------------------------------------------- C4: batch neighbours

BATCH = (12, 11)
BF16_STEP = 2.0**-7
"""A bf16 ulp is at most this share of the value."""


def _check_batch(pool_batch: Component) -> list[Violation]:
    ape = _ape("c4")
    requests = [_tokens("c4", f"tokens/{number}", count) for number, count in enumerate(BATCH)]
    alone = [pool_batch([request], ape)[0] for request in requests]
    together = pool_batch(requests, ape)
    swapped = pool_batch(requests[::-1], ape)[::-1]
    found = []
    for order, batch in (("packed", together), ("swapped", swapped)):
        for number, (got, want) in enumerate(zip(batch, alone, strict=True)):
            label = f"request {number}, {order}"
            if got.shape != want.shape:
                found.append(Violation("rows", f"{label}: {len(got)} entries, alone {len(want)}"))
                continue
            apart = (got.double() - want.double()).abs()
            size = want.double().square().mean(1, keepdim=True).sqrt()
            ulp = torch.maximum(want.double().abs(), BF16_STEP * size) * BF16_STEP  # near 0: of a value like the rest
            if (apart > ulp).any() or got.isnan().any():
                found.append(Violation("rows", f"{label}: off by {float((apart / ulp).max()):.3g} bf16 steps"))
            elif (apart > 0).any():
                found.append(Violation("batch invariance", f"{label}: {int((apart > 0).sum())} values differ by bits"))
    for number, (got, request) in enumerate(zip(alone, requests, strict=True)):
        want = pool(request, ape, RATIO)
        found += wrong_rows("rows", got, want, POOL_SLACK, _labels(f"request {number} alone, ", len(want)))
    return found


def _one_by_one(requests: Sequence[Tensor], ape: Tensor) -> list[Tensor]:
    return [pool(request, ape, RATIO) for request in requests]


def _tile_by_batch(requests: Sequence[Tensor], ape: Tensor) -> list[Tensor]:
    """The order of the sum depends on whether all lengths are equal: fp32, eight slots at once or two by two."""
    if len({len(request) for request in requests}) == 1:
        return [pool(request, ape, RATIO).float() for request in requests]
    return [_pool_pairwise(request, ape) for request in requests]


def _pool_pairwise(tokens: Tensor, ape: Tensor) -> Tensor:
    entries = len(tokens) // RATIO
    own = tokens[: entries * RATIO].view(entries, RATIO, 4, DIM)
    before = torch.cat((torch.zeros_like(own[:1]), own[:-1]))
    gate = torch.cat((before[:, :, 2] + ape[:RATIO], own[:, :, 3] + ape[RATIO:]), 1)
    gate[0, :RATIO] = -torch.inf
    terms = torch.cat((before[:, :, 0], own[:, :, 1]), 1) * gate.softmax(1)
    pairs = terms[:, 0::2] + terms[:, 1::2]
    return (pairs[:, 0] + pairs[:, 2]) + (pairs[:, 1] + pairs[:, 3])


def _neighbour_rows(requests: Sequence[Tensor], ape: Tensor) -> list[Tensor]:
    """Pooling runs over the packed buffer, so a request's first block is overlapped with its neighbour's last rows."""
    packed = pool(torch.cat(list(requests)), ape, RATIO)
    counts = [len(request) // RATIO for request in requests]
    return list(torch.split(packed[: sum(counts)], counts))


# ---------------------------------------------------------------------------------------------- C5: rejected drafts

DRAFTS = (5, 7)
FOLLOWING = 8


def _check_rollback(verify_and_roll_back: Component) -> list[Violation]:
    ape, found = _ape("c5"), []
    for start in range(6, 10):
        for drafts in DRAFTS:
            prefill, draft = _tokens("c5", f"prefill/{start}", start), _tokens("c5", f"draft/{drafts}", drafts)
            following = _tokens("c5", "following", FOLLOWING)
            for accepted in range(drafts + 1):
                got = verify_and_roll_back(prefill, draft, accepted, following, ape)
                want = pool(torch.cat((prefill, draft[:accepted], following)), ape, RATIO)
                labels = _labels(f"{start} tokens, {accepted} of {drafts} drafts accepted: ", len(want))
                found += wrong_rows("rejected drafts leave no trace", got, want, POOL_SLACK, labels)
    return found


def _clean_rollback(prefill: Tensor, draft: Tensor, accepted: int, following: Tensor, ape: Tensor) -> Tensor:
    compressor = Compressor(ape, RATIO, ape.shape[1], rollback_limit=len(draft))
    entries = torch.cat((compressor.feed(prefill), compressor.feed(draft)))
    void = compressor.rollback(len(draft) - accepted)
    return torch.cat((entries[: len(entries) - void], compressor.feed(following)))


def _ring_of_eight(prefill: Tensor, draft: Tensor, accepted: int, following: Tensor, ape: Tensor) -> Tensor:
    """State rows live at position modulo 8, so drafts past a boundary overwrite rows a shorter prefix still needs."""
    ring = torch.zeros(SLOTS, prefill.shape[1])
    kept = len(prefill) + accepted
    entries: list[Tensor] = []
    true = torch.cat((prefill, draft[:accepted], following))
    for position in range(len(true)):
        if position == kept:
            for late in range(kept, len(prefill) + len(draft)):
                ring[late % SLOTS] = draft[late - len(prefill)]
        ring[position % SLOTS] = true[position]
        if (position + 1) % RATIO == 0:
            block = position // RATIO
            first = max(0, block - 1) * RATIO
            rows = ring[torch.arange(first, position + 1) % SLOTS]
            entries.append(pool(rows, ape, RATIO)[-1])
    return torch.stack(entries)


# ---------------------------------------------------------------------------------------------- the reports

_ASCEND = "https://github.com/vllm-project/vllm-ascend/"

COMPRESSOR_REPORTS = (
    FieldReport(
        id="c2-chunked-keys",
        code="C2",
        stage="compressed",
        kind="pool_in_chunks",
        urls=("https://github.com/ml-explore/mlx-lm/pull/1189",),
        says="the indexer holds the keys of the current chunk only",
        contract="after every chunk there are tokens // 4 entries, equal to those of one prefill",
        check=_check_chunks,
        reference=_stateful,
        faults=(
            Fault("keys of the current chunk", "entries so far", _current_chunk_only),
            Fault("each chunk a new request", "equals one prefill", _bias_restarts),
        ),
    ),
    FieldReport(
        id="c5-rejected-drafts",
        code="C5",
        stage="compressed",
        kind="verify_and_roll_back",
        urls=(f"{_ASCEND}issues/9111", "https://github.com/GDzhu01/vllm-ascend-deepseekv4/pull/132"),
        says="draft tokens overwrite state that a shorter accepted prefix needs",
        contract="entries equal those of a run that never saw the rejected tokens",
        check=_check_rollback,
        reference=_clean_rollback,
        faults=(Fault("ring of eight rows", "rejected drafts leave no trace", _ring_of_eight),),
    ),
    FieldReport(
        id="c4-batch-neighbours",
        code="C4",
        stage="compressed",
        kind="pool_batch",
        urls=(f"{_ASCEND}issues/9496",),
        says="a request's entries change in their last bits with the lengths of its neighbours",
        contract="right rows whatever the batch; bit for bit the same where the policy is batch invariance",
        check=_check_batch,
        reference=_one_by_one,
        faults=(
            Fault("tile by batch shape", "batch invariance", _tile_by_batch),
            Fault("windows over the packed buffer", "rows", _neighbour_rows),
        ),
        opt_in=("batch invariance",),
    ),
)
