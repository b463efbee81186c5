"""The compressor of SGLang's DeepSeek-V4 models: a ring of raw GEMM outputs, read by windows that straddle steps."""

import torch
from torch import Tensor

from ..reference.inputs import CompressorInputs, LayerInputs, Span
from . import _sglang_math as math_

OVERLAP_RATIO = 4
"""The ratio whose entries also pool the block before their own."""
MISSING_SCORE = torch.finfo(torch.float32).min
"""Gate of a slot before token 0: the most negative finite fp32, to which the gate bias is still added."""
POOL_BLOCK = 1024
"""Entries pooled at a time; bounds the memory of the gathered windows."""


class StateRing:
    """The compressor state of one request: the last raw rows (kv and gate score, no bias added), by position mod size.

    Rows are fp32 [width]. A row that was never written is NaN, so a window that reads one cannot go unnoticed.
    """

    def __init__(self, ratio: int, width: int, device: torch.device) -> None:
        self.ratio = ratio
        self.overlap = ratio if ratio == OVERLAP_RATIO else 0
        self.size = ratio + self.overlap
        self.rows = torch.full((self.size, width), torch.nan, device=device)

    def write(self, start: int, rows: Tensor) -> None:
        """Keeps what a later window may need of rows [n, width] at positions start, start + 1, ...

        That is every position from the block before the last, incomplete one on (that block itself without overlap).
        """
        stop = start + len(rows)
        first = max(start, stop // self.ratio * self.ratio - self.overlap)
        position = torch.arange(first, stop, device=rows.device)
        self.rows[position % self.size] = rows[first - start :]

    def read(self, start: int, stop: int) -> Tensor:
        """Rows of positions [start, stop), at most `size` of them: fp32 [n, width]."""
        position = torch.arange(start, stop, device=self.rows.device)
        return self.rows[position % self.size]


class CompressorModel:
    """Building blocks that turn the rows of one compressor into pooled entries, step by step."""

    def pool(self, kv: Tensor, score: Tensor, ape: Tensor) -> Tensor:
        """Entries from their windows: kv, score fp32 [n, slots, D], ape fp32 [slots, D] -> fp32 [n, D]."""
        return math_.gated_pool(kv, score, ape)

    def new_ring(self, ratio: int, width: int, device: torch.device) -> StateRing:
        return StateRing(ratio, width, device)

    def read_window(self, ring: StateRing, chunk: Tensor, chunk_start: int, start: int, stop: int) -> Tensor:
        """Rows of positions [start, stop): from the ring before `chunk_start`, from the step's own rows after it.

        Positions before token 0 are kv 0 and score `MISSING_SCORE`. fp32 [stop - start, width].
        """
        parts = []
        if start < 0:
            missing = torch.zeros((-start, chunk.shape[1]), device=chunk.device)
            missing[:, chunk.shape[1] // 2 :] = MISSING_SCORE
            parts.append(missing)
        if max(start, 0) < chunk_start:
            parts.append(ring.read(max(start, 0), min(stop, chunk_start)))
        parts.append(chunk[max(start - chunk_start, 0) : stop - chunk_start])
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def split_window(self, rows: Tensor, ratio: int) -> tuple[Tensor, Tensor]:
        """kv and score of consecutive windows, fp32 [n, slots, D] each, from rows [n * ratio (+ ratio), width].

        Ratio 4, columns kv overlap, kv own, score overlap, score own: the overlap columns of the block before, then the
        own columns of the entry's block. Ratio 128, columns kv, score: the entry's block.
        """
        blocks = rows.view(-1, ratio, rows.shape[1])
        if ratio != OVERLAP_RATIO:
            kv, score = blocks.chunk(2, -1)
            return kv, score
        kv_before, kv_own, score_before, score_own = blocks.chunk(4, -1)
        return (
            torch.cat((kv_before[:-1], kv_own[1:]), 1),
            torch.cat((score_before[:-1], score_own[1:]), 1),
        )

    def pool_span(self, part: CompressorInputs, ring: StateRing, chunk: Tensor, span: Span, out: Tensor) -> None:
        """Pools the entries that `span` completes into `out` [entries of the request, D], then updates the ring."""
        ratio = ring.ratio
        first, last = span.start // ratio, span.stop // ratio
        for entry in range(first, last, POOL_BLOCK):
            end = min(entry + POOL_BLOCK, last)
            rows = self.read_window(ring, chunk, span.start, entry * ratio - ring.overlap, end * ratio)
            kv, score = self.split_window(rows, ratio)
            out[entry:end] = self.pool(kv, score, part.ape)
        ring.write(span.start, chunk)

    def pool_layer(self, inputs: LayerInputs, part: CompressorInputs) -> Tensor:
        """Every entry of every request, packed: fp32 [E, D]. Entries of `pooled_prefix` are taken as given."""
        out = torch.full((inputs.entry_offset[-1], part.norm_weight.shape[0]), torch.nan, device=part.ape.device)
        rings = self.start_requests(inputs, part, out)
        for step in inputs.steps:
            for span in step:
                self._pool_request(inputs, part, rings[span.request], span, out)
        return out

    def start_requests(self, inputs: LayerInputs, part: CompressorInputs, out: Tensor) -> list[StateRing]:
        """One ring a request, holding the tokens before its first step; copies its given entries into `out`."""
        rings, given = [], 0
        for request, count in enumerate(inputs.prefix_entries):
            ring = self.new_ring(inputs.ratio, part.kv_score.shape[1], out.device)
            entry = inputs.entry_offset[request]
            out[entry : entry + count] = part.pooled_prefix[given : given + count]
            given += count
            first, complete = inputs.first_token(request), count * inputs.ratio
            start = min((s.start for step in inputs.steps for s in step if s.request == request), default=complete)
            if first < complete:
                token = inputs.token_offset[request]
                ring.write(first, part.kv_score[token : token + complete - first])
            if complete < start:
                self._pool_request(inputs, part, ring, Span(request, complete, start), out)
            rings.append(ring)
        return rings

    def _pool_request(
        self, inputs: LayerInputs, part: CompressorInputs, ring: StateRing, span: Span, out: Tensor
    ) -> None:
        token = inputs.token_offset[span.request] - inputs.first_token(span.request)
        entries = slice(*inputs.entry_offset[span.request : span.request + 2])
        chunk = part.kv_score[token + span.start : token + span.stop]
        self.pool_span(part, ring, chunk, span, out[entries])
