"""SGLang's compressor, step by step: its plans, its state ring, its pooling kernel and its store into paged caches.

A request's token p lies at full location page * (page_size * ratio) + p % (page_size * ratio), so that its entry has
slot location // ratio, exactly as SGLang lays out its pools. The state ring of ratio 4 follows these (shuffled) pages,
8 rows a page of 256 tokens; the ring of ratio 128 belongs to the request. Source: SGLang 0.5.23, `c_plan.cuh` and
`compressor_v2.py`.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..reference.inputs import CompressorInputs, LayerInputs, Span, Step

SYSTEM_PAGE = 256
"""Tokens of a page of SGLang's token pool; its window cache has pages of the same size."""
RATIO_WITH_OVERLAP = 4
RING_ROWS = {4: 8, 128: 128}
"""Rows of one state ring by ratio, without speculation."""
PLAN_TOKENS = 1 << 16
"""Tokens of one prefill plan at most: it numbers them with 16 bits. A longer step becomes several calls."""
Which = Literal["index", "main"]


@dataclass(frozen=True)
class Call:
    """One call of SGLang's compressor.

    plan     SGLang's plan.   tokens  [n] int64 rows of `kv_score`.
    entry    [plan rows] int64 packed entry that each output row completes, -1 for a row that completes none.
    out_loc  [n] int64 pool slot of the entry that a token completes, 0 where it completes none.
    """

    plan: Any
    tokens: Tensor
    entry: Tensor
    out_loc: Tensor


def compressor_inputs(inputs: LayerInputs, which: Which) -> CompressorInputs:
    part = inputs.index if which == "index" else inputs.main
    if part is None:
        raise ValueError(f"a {inputs.kind} layer has no {which} compressor; choose a layer that has one")
    return part


def calls_of(steps: tuple[Step, ...], limit: int = PLAN_TOKENS) -> Iterator[Step]:
    """Steps as SGLang receives them: no call has more than `limit` tokens, none has a request twice."""
    for step in steps:
        call: list[Span] = []
        room = limit
        for span in step:
            start = span.start
            while start < span.stop:
                stop = min(span.stop, start + room)
                call.append(Span(span.request, start, stop))
                room, start = room - (stop - start), stop
                if room == 0:
                    yield tuple(call)
                    call, room = [], limit
        if call:
            yield tuple(call)


def is_decode(call: Step) -> bool:
    """Whether SGLang runs `call` as a decode batch: one token of every request, each with a history."""
    return all(span.stop - span.start == 1 and span.start > 0 for span in call)


class LiveCompressor:
    """Token locations, plans and state of one layer's compressors for one case; made anew for every stage."""

    def __init__(self, inputs: LayerInputs) -> None:
        self.inputs = inputs
        self.ratio: Any = inputs.ratio
        self.device = inputs.page_table.device
        self.page_tokens = inputs.page_size * self.ratio
        self.locations = inputs.num_pages * self.page_tokens + len(inputs.lengths) * self.page_tokens
        self.req_to_token = self._req_to_token()
        self.full_to_state = torch.arange(self.locations, device=self.device)

    def _req_to_token(self) -> Tensor:
        """int32 [N, longest] full locations; tokens past a request's last page of entries get a spare page."""
        longest = -(-max(self.inputs.lengths) // self.page_tokens) * self.page_tokens
        position = torch.arange(longest, device=self.device)
        table = torch.nn.functional.pad(
            self.inputs.page_table, (0, max(0, longest // self.page_tokens - self.inputs.page_table.shape[1])), value=-1
        )
        spare = self.inputs.num_pages + torch.arange(len(table), device=self.device)
        page = table[:, position // self.page_tokens]
        page = torch.where(page < 0, spare[:, None], page)
        return (page * self.page_tokens + position % self.page_tokens).to(torch.int32)

    def state(self, which: Which) -> Tensor:
        """A state pool nothing was written to, NaN throughout: [pages, ratio, 4 D] (ratio 4) or [N, 128, 2 D] fp32."""
        width = compressor_inputs(self.inputs, which).kv_score.shape[1]
        if self.ratio == RATIO_WITH_OVERLAP:
            rows = self.locations // SYSTEM_PAGE * RING_ROWS[self.ratio]
        else:
            rows = len(self.inputs.lengths) * RING_ROWS[self.ratio]
        return torch.full((rows // self.ratio, self.ratio, width), math.nan, device=self.device)

    def call(self, step: Step) -> Call:
        """SGLang's plan for one step and what its output rows mean."""
        request = torch.tensor([span.request for span in step], device=self.device)
        position = torch.cat([torch.arange(span.start, span.stop) for span in step]).to(self.device)
        lengths = torch.tensor([span.stop - span.start for span in step], device=self.device)
        owner = request.repeat_interleave(lengths)
        location = self.req_to_token[owner, position].long()
        out_loc = torch.where((position + 1) % self.ratio == 0, location // self.ratio, 0)
        first = torch.tensor([self.inputs.first_token(span.request) for span in step], device=self.device)
        offset = torch.tensor([self.inputs.token_offset[span.request] for span in step], device=self.device)
        tokens = (offset - first).repeat_interleave(lengths) + position
        plan = self._plan(step, request)
        return Call(plan, tokens, self.completed(plan, step, owner), out_loc)

    def completed(self, plan: Any, step: Step, owner: Tensor) -> Tensor:
        """[plan rows] int64 packed entry that each output row completes, -1 for none; owner [n]: a token's request."""
        return self._decode_entry(step) if plan.is_decode else self._prefill_entry(plan, owner)

    def _plan(self, step: Step, request: Tensor) -> Any:
        from sglang.kernels.ops.attention.dsv4 import CompressorDecodePlan, CompressorPrefillPlan

        common = {
            "compress_ratio": self.ratio,
            "req_pool_indices": request,
            "req_to_token": self.req_to_token,
            "full_to_state": self.full_to_state,
            "swa_page_size": SYSTEM_PAGE,
            "ring_size": RING_ROWS[self.ratio],
        }
        seq_lens = torch.tensor([span.stop for span in step])
        if is_decode(step):
            return CompressorDecodePlan.generate(seq_lens=seq_lens.to(self.device), **common)
        extend = torch.tensor([span.stop - span.start for span in step])
        plan = CompressorPrefillPlan.generate(
            seq_lens=seq_lens, extend_lens=extend, num_q_tokens=int(extend.sum()), **common
        )
        torch.cuda.synchronize()  # the planner copies from a pinned buffer that only the plan keeps alive
        return plan

    def _prefill_entry(self, plan: Any, owner: Tensor) -> Tensor:
        """Packed entries of a prefill plan's rows (uint32 seq_len, then uint16 token number), in the plan's order."""
        seq_len = plan.plan_c[:, :4].contiguous().view(torch.int32).squeeze(-1).long()
        token = plan.plan_c[:, 4:6].contiguous().view(torch.int16).squeeze(-1).long() & (PLAN_TOKENS - 1)
        offset = torch.tensor(self.inputs.entry_offset[:-1], device=self.device)
        entry: Tensor = offset[owner[token]] + seq_len // self.ratio - 1
        return entry

    def _decode_entry(self, step: Step) -> Tensor:
        offset = self.inputs.entry_offset
        rows = [
            offset[span.request] + span.stop // self.ratio - 1 if span.stop % self.ratio == 0 else -1 for span in step
        ]
        return torch.tensor(rows, device=self.device)

    def pool(self, which: Which) -> Tensor:
        """Pooled entries fp32 [E, D] of every step, in packed order; prefix entries as given."""
        from sglang.kernels.ops.attention.dsv4 import compress_forward

        part, state = compressor_inputs(self.inputs, which), self.state(which)
        width = part.norm_weight.shape[0]
        pooled = torch.full((self.inputs.entry_offset[-1], width), math.nan, device=self.device)
        pooled[self.prefix_entries()] = part.pooled_prefix
        kv_score = part.kv_score.contiguous()
        for keep, step in self._history_and_steps():
            call = self.call(step)
            rows = compress_forward(
                state,
                kv_score[call.tokens],
                part.ape.contiguous(),
                call.plan,
                head_dim=width,
                compress_ratio=self.ratio,
            )
            done = call.entry >= 0
            if keep:
                pooled[call.entry[done]] = rows[done]
        return pooled

    def _history_and_steps(self) -> Iterator[tuple[bool, Step]]:
        """(False, the tokens that leave the overlap state of pooled prefixes), then (True, each call)."""
        if history := self.history_step():
            yield False, history
        for step in calls_of(self.inputs.steps):
            yield True, step

    def history_step(self) -> Step:
        """The block that ends each request's pooled prefix (ratio 4): pooling it leaves the overlap state behind."""
        if self.ratio != RATIO_WITH_OVERLAP:
            return ()
        return tuple(
            Span(request, self.inputs.first_token(request), entries * self.ratio)
            for request, entries in enumerate(self.inputs.prefix_entries)
            if entries
        )

    def prefix_step(self) -> Step:
        """Every token of the pooled prefixes, as the prefill whose entries they are."""
        return tuple(
            Span(request, 0, entries * self.ratio)
            for request, entries in enumerate(self.inputs.prefix_entries)
            if entries
        )

    def prefix_entries(self) -> Tensor:
        """[P] int64 packed entries that are given pooled."""
        parts = [
            torch.arange(offset, offset + entries, device=self.device)
            for offset, entries in zip(self.inputs.entry_offset, self.inputs.prefix_entries, strict=False)
        ]
        return torch.cat(parts)

    def store(self, which: Which, pooled: Tensor, table: Tensor, pool: Tensor, page_size: int) -> None:
        """`store_steps` of everything: pooled prefixes first, then the case's steps."""
        self.store_steps((self.prefix_step(), *self.inputs.steps), which, pooled, table, pool, page_size)

    def store_steps(
        self, steps: tuple[Step, ...], which: Which, pooled: Tensor, table: Tensor, pool: Tensor, page_size: int
    ) -> None:
        """Norm, RoPE, (index: Hadamard,) quantise and store of the entries of `steps`, with the plans that make them.

        pooled fp32 [E, D], table complex64, pool uint8 [pages, page bytes].
        """
        from sglang.kernels.ops.attention.dsv4 import compress_norm_rope_store

        part = compressor_inputs(self.inputs, which)
        for step in calls_of(steps):
            call = self.call(step)
            compress_norm_rope_store(
                pooled[call.entry.clamp_min(0)].contiguous(),
                call.plan,
                norm_weight=part.norm_weight,
                norm_eps=self.inputs.config.rms_norm_eps,
                freq_cis=table,
                out_loc=call.out_loc,
                kvcache=pool,
                page_size=page_size,
            )
