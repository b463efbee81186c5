"""The inputs of one layer, exactly as every path receives them."""

from dataclasses import dataclass, fields, replace
from typing import Self

import torch
from torch import Tensor

from .config import LayerKind, ModelConfig


@dataclass(frozen=True)
class Span:
    """Tokens [start, stop) of one request, processed together in one step."""

    request: int
    start: int
    stop: int


Step = tuple[Span, ...]


@dataclass(frozen=True)
class CompressorInputs:
    """What one compressor (the indexer's or the main one) reads, packed over requests.

    Shapes, with T tokens, P entries given already pooled, D the entry width:
        kv_score      [T, 4 D] fp32 for ratio 4: kv of the overlap half, kv of the own half, then the same two of the
                      gate score; [T, 2 D] fp32 for ratio 128: kv, score. The compressor's GEMM output, gate bias not
                      yet added.
        ape           [2 ratio, D] fp32 for ratio 4 (rows 0-3 overlap half, 4-7 own half), [ratio, D] for ratio 128.
        norm_weight   [D] fp32.
        pooled_prefix [P, D] fp32: entries of each request's prefix, packed; replaces pooling them from tokens.
    """

    kv_score: Tensor
    ape: Tensor
    norm_weight: Tensor
    pooled_prefix: Tensor


@dataclass(frozen=True)
class LayerInputs:
    """Everything one layer reads for one case. Produced by `cases`, consumed by every path and by the reference.

    N requests, R rows (query tokens that are compared), H index heads, D index head dim, A attention heads, C head_dim.

    lengths           tokens of each request after the last step.
    prefix_entries    entries of each request given pooled (0 unless the history is given pooled); the request's tokens
                      in `kv_score` then start at `first_token(request)`.
    steps             the order in which tokens arrive: whole prefill is one step, chunked prefill several, decode many.
    row_request       [R] int64, row_position [R] int64: the rows, in step order. position is request-relative.
    index             the indexer's compressor (`csa` only, else None).
    index_query       [R, H, D] bf16, after wq_b, before RoPE.  index_weight [R, H] bf16, after weights_proj, unscaled.
    main              the main compressor (`csa` and `hca`, else None).
    window_kv         [W, C] bf16 latents (after wkv, before kv_norm) of the tokens some row's window covers.
    window_request    [W] int64, window_position [W] int64: which tokens these are.
    window_index      [R, sliding_window] int64 into W, oldest first, -1 where the window starts before token 0.
    kv_norm_weight    [C] fp32.
    attn_query        [R, A, C] bf16, after wq_b, before the per-head norm and RoPE.   attn_sink [A] fp32.
    page_table        [N, pages] int64: the page of each 64 entries of a request (the same table for index and main
                      cache); -1 past the request's last page.
    num_pages         pages in the pool; pages no table names are never read.
    """

    config: ModelConfig
    kind: LayerKind
    layer: int
    lengths: tuple[int, ...]
    prefix_entries: tuple[int, ...]
    steps: tuple[Step, ...]
    row_request: Tensor
    row_position: Tensor
    index: CompressorInputs | None
    index_query: Tensor | None
    index_weight: Tensor | None
    main: CompressorInputs | None
    window_kv: Tensor
    window_request: Tensor
    window_position: Tensor
    window_index: Tensor
    kv_norm_weight: Tensor
    attn_query: Tensor
    attn_sink: Tensor
    page_table: Tensor
    num_pages: int
    page_size: int = 64

    @property
    def ratio(self) -> int:
        """Tokens an entry stands for: 4 (`csa`), 128 (`hca`), 0 (`swa`)."""
        return self.config.compress_ratios[self.layer]

    @property
    def entries(self) -> tuple[int, ...]:
        """Complete entries of each request: lengths // ratio."""
        return tuple(length // self.ratio if self.ratio else 0 for length in self.lengths)

    @property
    def entry_offset(self) -> tuple[int, ...]:
        """First row of each request in the packed entry axis [E], and E itself last (N + 1 numbers)."""
        offset = [0]
        for count in self.entries:
            offset.append(offset[-1] + count)
        return tuple(offset)

    def first_token(self, request: int) -> int:
        """First token of `request` in `kv_score`: 0, or the overlap block before the first entry to be pooled."""
        overlap = self.ratio if self.ratio == 4 else 0
        return max(0, self.prefix_entries[request] * self.ratio - overlap)

    @property
    def token_offset(self) -> tuple[int, ...]:
        """First row of each request in the packed token axis of `kv_score`, and T last (N + 1 numbers)."""
        offset = [0]
        for request, length in enumerate(self.lengths):
            offset.append(offset[-1] + length - self.first_token(request))
        return tuple(offset)

    @property
    def visible(self) -> Tensor:
        """[R] int64: entries a row may select, (position + 1) // ratio (contract K1)."""
        if not self.ratio:
            return torch.zeros_like(self.row_position)
        return (self.row_position + 1) // self.ratio

    @property
    def entry_position(self) -> Tensor:
        """[E] int64: RoPE position of every entry, ratio * (entry number within its request)."""
        device = self.row_position.device
        return torch.cat(
            [torch.arange(count, device=device) * self.ratio for count in self.entries] or [torch.empty(0)]
        )

    @property
    def entry_slot(self) -> Tensor:
        """[E] int64: pool slot of every entry, page_table[request, e // page_size] * page_size + e % page_size."""
        slots = []
        for request, count in enumerate(self.entries):
            entry = torch.arange(count, device=self.page_table.device)
            slots.append(self.page_table[request, entry // self.page_size] * self.page_size + entry % self.page_size)
        return torch.cat(slots)

    def to(self, device: str | torch.device) -> Self:
        """The same inputs with every tensor on `device`."""
        moved: dict[str, object] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                moved[field.name] = value.to(device)
            elif isinstance(value, CompressorInputs):
                moved[field.name] = CompressorInputs(
                    *(getattr(value, part.name).to(device) for part in fields(CompressorInputs))
                )
        return replace(self, **moved)  # type: ignore[arg-type]
