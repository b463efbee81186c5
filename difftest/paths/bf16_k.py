"""The bf16 index-K path: the kernels of `difftest.kernels`, with everything around them taken from SGLang's fp8
path.
"""

from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..kernels import prepare_cuda, query, store
from ..kernels.cuda import find_nvcc
from ..kernels.layout import NO_SLOT, PAGE_BYTES, POISON_BYTE, empty_cache, read_slots, write_slots
from ..kernels.naive import gathered_scores
from ..kernels.rope import Yarn, rope_table
from ..kernels.score import paged_scores
from ..reference.inputs import LayerInputs
from ..trace import StageTensors, Trace
from .base import Availability, CannotFeed, Declaration, Path, Rounding, get_path

PAGE_PADDING = 1024
"""Bytes of poison behind every page, so that the page stride exceeds the payload."""

QueryFormat = Literal["bf16", "fp8"]
STORES: dict[str, ModuleType] = {"triton": store, "cuda": prepare_cuda}
QUERY_STORED: dict[str, Literal["bf16", "e4m3"]] = {"bf16": "bf16", "fp8": "e4m3"}


class Bf16K(Path):
    """Index keys stored and read as bf16. `compressed`, `topk`, `kv` and `attention` are those of a sibling path.

    q      format of the index query: bf16, or fp8 (e4m3 with its scale folded into the head weight, as SGLang does).
    store  who prepares keys and bf16 queries: triton (compiled on a GPU, interpreted elsewhere), or cuda (a GPU only).
    rest   the sibling; `auto` takes sglang-fp8 for inputs on a GPU where it can run, else sglang-fp8-model.
    """

    name = "bf16-k"
    says: ClassVar[str] = "our Triton kernels: paged bf16 index-K store and scores"

    def __init__(self, q: str = "bf16", store: str = "triton", rest: str = "auto") -> None:
        for option, value, known in (("q", q, QUERY_STORED), ("store", store, STORES)):
            if value not in known:
                raise ValueError(f"option {option}={value} is unknown: choose one of {', '.join(known)}")
        self.query_format = q
        self.store_kernel = store
        self.rest = rest
        self._sibling: Path | None = None

    @property
    def declares(self) -> Declaration:  # type: ignore[override]
        """Keys and queries are rounded once, to their stored format; scores are fp32 sums of exact products."""
        sibling = self._sibling or get_path("sglang-fp8-model" if self.rest == "auto" else self.rest)
        query = Rounding(stored=QUERY_STORED[self.query_format])
        return replace(
            sibling.declares, key=Rounding(stored="bf16"), query=query, weight="none", score="fp32", score_rounds="none"
        )

    def availability(self) -> Availability:
        if self.store_kernel == "cuda" and not torch.cuda.is_available():
            return Availability(False, "store=cuda needs a CUDA device", "use store=triton, which runs anywhere")
        if self.store_kernel == "cuda" and find_nvcc() is None:
            return Availability(False, "store=cuda needs nvcc", "install the CUDA toolkit, or use store=triton")
        return Availability(True)

    def sibling(self, inputs: LayerInputs) -> Path:
        """The path that computes the stages around the index, chosen once for the device of `inputs`."""
        if self._sibling is None:
            spec = self.rest
            if spec == "auto":
                spec = "sglang-fp8" if _live_sglang(inputs) else "sglang-fp8-model"
            self._sibling = get_path(spec)
        return self._sibling

    def compressed(self, inputs: LayerInputs, trace: Trace) -> StageTensors:
        return self.sibling(inputs).stage("compressed", inputs, trace)

    def topk(self, inputs: LayerInputs, trace: Trace) -> StageTensors:
        return self.sibling(inputs).stage("topk", inputs, trace)

    def kv(self, inputs: LayerInputs, trace: Trace) -> StageTensors:
        return self.sibling(inputs).stage("kv", inputs, trace)

    def attention(self, inputs: LayerInputs, trace: Trace) -> StageTensors:
        return self.sibling(inputs).stage("attention", inputs, trace)

    def index_k(self, inputs: LayerInputs, trace: Trace) -> StageTensors:
        """Stores the entries step by step into a poisoned pool with padded pages, and reads them back."""
        cache = poisoned_cache(inputs)
        slots = inputs.entry_slot
        pooled = trace.value("compressed").float()
        for entries in entries_of_steps(inputs):
            self.store_step(inputs, pooled, entries, slots, cache)
        return {"value": read_slots(cache, slots).float(), "raw": cache}

    def store_step(self, inputs: LayerInputs, pooled: Tensor, entries: Tensor, slots: Tensor, cache: Tensor) -> None:
        """Stores `entries` [n] with one padding row behind them: NaN, and no slot."""
        assert inputs.index is not None
        position = inputs.entry_position[entries]
        padded = torch.cat((pooled[entries], torch.full_like(pooled[:1], torch.nan)))
        slot = torch.cat((slots[entries], slots.new_tensor([NO_SLOT])))
        row = torch.arange(len(slot), device=slot.device).clamp_max(len(slot) - 2)
        table = rope_table(position, yarn(inputs))
        STORES[self.store_kernel].store(
            padded, inputs.index.norm_weight, inputs.config.rms_norm_eps, table, row, slot, cache
        )

    def index_q(self, inputs: LayerInputs, trace: Trace) -> StageTensors:
        assert inputs.index_query is not None
        row = torch.arange(len(inputs.row_position), device=inputs.row_position.device)
        table = rope_table(inputs.row_position, yarn(inputs))
        if self.query_format == "bf16":
            kernels = prepare_cuda if self.store_kernel == "cuda" else query
            return {"value": kernels.index_query(inputs.index_query, table, row).float()}
        codes, scale = query.index_query_fp8(inputs.index_query, table, row)
        return {"value": query.decode_e4m3(codes).float() * scale[..., None], "codes": codes, "scale": scale[..., None]}

    def head_weight(self, inputs: LayerInputs, trace: Trace) -> StageTensors:
        assert inputs.index_weight is not None
        return {"value": query.head_weight(inputs.index_weight)}

    def score(self, inputs: LayerInputs, trace: Trace) -> StageTensors:
        stored_query, scale = bf16_query(trace)
        weight = trace.value("head_weight").float() * scale
        visible = inputs.visible
        width = int(visible.max()) if len(visible) else 0
        table = inputs.page_table.to(torch.int32)
        return {
            "value": self.scores(
                stored_query, weight, bf16_cache(inputs, trace), table, visible, inputs.row_request, width=width
            )
        }

    def scores(
        self,
        query: Tensor,
        weight: Tensor,
        cache: Tensor,
        page_table: Tensor,
        lengths: Tensor,
        request: Tensor,
        *,
        width: int,
    ) -> Tensor:
        """`kernels.score.paged_scores`; the rows of a single request together, as its prefill reads them."""
        together = len(query) if len(page_table) == 1 and len(query) else 1
        return paged_scores(query, weight, cache, page_table, lengths, request, width=width, next_n=together)


class Bf16KNaive(Bf16K):
    """The same cache, read by gathering every row's keys: the version that runs out of memory at long contexts."""

    name = "bf16-k-naive"
    says: ClassVar[str] = "bf16 index-K read by gathering all keys with torch"

    def scores(
        self,
        query: Tensor,
        weight: Tensor,
        cache: Tensor,
        page_table: Tensor,
        lengths: Tensor,
        request: Tensor,
        *,
        width: int,
    ) -> Tensor:
        """`kernels.naive.gathered_scores`."""
        return gathered_scores(query, weight, cache, page_table, lengths, request, width=width)


def yarn(inputs: LayerInputs) -> Yarn:
    """Rotary constants of the layers with an indexer."""
    config = inputs.config
    return Yarn(
        theta=config.compress_rope_theta,
        factor=config.rope_factor,
        original_positions=config.rope_original_max_position,
        beta_fast=config.rope_beta_fast,
        beta_slow=config.rope_beta_slow,
    )


def poisoned_cache(inputs: LayerInputs) -> Tensor:
    """A pool of NaN, uint8 [num_pages, page stride], with poison behind every page."""
    return empty_cache(inputs.num_pages, inputs.page_table.device, PAGE_BYTES + PAGE_PADDING, POISON_BYTE)


def entries_of_steps(inputs: LayerInputs) -> Iterator[Tensor]:
    """Packed entry numbers, int64, in order of arrival: the given prefixes, then what each step completes (never
    empty).
    """
    device = inputs.page_table.device
    offset = inputs.entry_offset
    spans = [[(offset[request], 0, count) for request, count in enumerate(inputs.prefix_entries)]]
    for step in inputs.steps:
        spans.append([])
        for span in step:
            first = max(span.start // inputs.ratio, inputs.prefix_entries[span.request])
            spans[-1].append((offset[span.request], first, span.stop // inputs.ratio))
    for step_spans in spans:
        entries = torch.cat([torch.arange(base + first, base + max(first, last)) for base, first, last in step_spans])
        if len(entries):
            yield entries.to(device)


def bf16_cache(inputs: LayerInputs, trace: Trace) -> Tensor:
    """The pool that the scorer reads: the one the store wrote where it holds exactly the keys in `trace`, else a new
    one.

    Raises CannotFeed if the keys (another path's) are not bf16 numbers.
    """
    stored, slots = trace["index_k"], inputs.entry_slot
    key = as_bf16(stored["value"], "index_k")
    raw = stored.get("raw")
    ours = (inputs.num_pages, PAGE_BYTES + PAGE_PADDING)
    if raw is not None and raw.shape == ours and torch.equal(read_slots(raw, slots), key):
        return raw
    fresh = poisoned_cache(inputs)
    write_slots(fresh, slots, key)
    return fresh


def bf16_query(trace: Trace) -> tuple[Tensor, Tensor]:
    """Queries bf16 [R, H, D] and the factor of each head weight, [R, H]: 1, or the scale of e4m3 codes (exact in bf16).

    Raises CannotFeed if the query (another path's) is neither.
    """
    stored = trace["index_q"]
    codes, scale = stored.get("codes"), stored.get("scale")
    if codes is not None and scale is not None and codes.dtype == torch.uint8 and scale.shape[-1] == 1:
        decoded = query.decode_e4m3(codes.contiguous())
        if decoded.shape == stored["value"].shape and torch.equal(decoded.float() * scale, stored["value"]):
            return decoded, scale[..., 0].contiguous()
    return as_bf16(stored["value"], "index_q").contiguous(), torch.ones_like(stored["value"][..., 0])


def as_bf16(value: Tensor, stage: str) -> Tensor:
    """`value` in bf16; CannotFeed names the first element that bf16 cannot hold. NaN passes as NaN."""
    rounded = value.to(torch.bfloat16)
    changed = (rounded.to(value.dtype) != value) & ~value.isnan()
    if bool(changed.any()):
        where = tuple(changed.nonzero()[0].tolist())
        raise CannotFeed(
            f"{stage}{list(where)} is {value[where].item()!r}, no bf16 number, and this path's scorer reads bf16; "
            "substitute a path that stores bf16, or substitute `score` instead"
        )
    return rounded


def _live_sglang(inputs: LayerInputs) -> bool:
    """Whether `inputs` are on a GPU and the installed SGLang's own kernels run there."""
    if not inputs.page_table.is_cuda:
        return False
    try:
        return get_path("sglang-fp8").availability().ok
    except (ValueError, ImportError):
        return False
