"""Mutants of `index_k`: preparation, storage and read-back of index keys."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..kernels.layout import PAGE_BYTES, read_slots
from ..paths import _sglang_math as math_
from ..reference.inputs import LayerInputs
from ..stages import StageName
from ..trace import StageTensors, Trace
from .adapters import BF16, FP8, as_key, as_rotation, keys, make_key, make_query, merged, queries, reported
from .bench_cases import CHUNKED, DECODE, FLOOR
from .mutant import Block, Mutant, Seed, replaced

SHORT_ROW = 120
"""Dims of a key that a row 16 bytes too narrow carries."""

BIG_PAGE = 254_200
"""Added to every page number: from page 254,201 on a 32-bit byte offset wraps for pages of 8,448 bytes."""

SCALE_BYTES = 4


def _identity(x: Tensor) -> Tensor:
    return x


def _rounded_weight(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return math_.rms_norm(x, weight.bfloat16().float(), eps)


def _layer_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return math_.rms_norm(x - x.mean(-1, keepdim=True), weight, eps)


def _large_eps(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return math_.rms_norm(x, weight, 10 * eps)


def _half_weight(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The weight is applied as 1 + weight."""
    return math_.rms_norm(x, 1 + weight, eps)


def _unscaled_hadamard(x: Tensor) -> Tensor:
    return math_.hadamard(x) * math.sqrt(x.shape[-1])


def _rounded_steps(inputs: LayerInputs, pooled: Tensor, weight: Tensor, positions: Tensor) -> Tensor:
    """The normed key is rounded to bf16, as the published model does and this path declares not to."""
    return make_key(inputs, pooled, weight, positions, norm=lambda x, w, e: math_.rms_norm(x, w, e).bfloat16().float())


def _inverse_rotation(inputs: LayerInputs, x: Tensor, positions: Tensor) -> Tensor:
    table = math_.rope_table(inputs.config, inputs.kind, positions) * torch.tensor([1.0, -1.0])
    return math_.rotate(x, table)


# storage ------------------------------------------------------------------------------------------------------------


def _codes(change: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Seed:
    """change(key fp32 [n, D]) -> codes and scale, in place of `quantise_key`."""
    return Seed("quantise_key", lambda path, original: change)


def _truncated_codes(key: Tensor) -> tuple[Tensor, Tensor]:
    scale = math_.raw_scale(key)
    codes = math_.encode_e4m3(key / scale)
    too_far = math_.decode_e4m3(codes).abs() > (key / scale).abs()
    return torch.where(too_far, codes - 1, codes), scale


def _chopped_keys(inputs: LayerInputs, pooled: Tensor, weight: Tensor, positions: Tensor) -> Tensor:
    """Keys whose bf16 rounding is a truncation."""
    return (make_key(inputs, pooled, weight, positions).view(torch.int32) & ~0xFFFF).view(torch.float32)


def _pow2_scale(key: Tensor) -> tuple[Tensor, Tensor]:
    scale = torch.exp2(math_.raw_scale(key).log2().ceil())
    return math_.encode_e4m3(key / scale), scale


def _no_floor(key: Tensor) -> tuple[Tensor, Tensor]:
    scale = key.abs().amax(-1, keepdim=True) / math_.E4M3_MAX
    return math_.encode_e4m3(key / scale), scale


def _scale_after_rounding(key: Tensor) -> tuple[Tensor, Tensor]:
    """Codes from the raw scale, and the scale rounded to a power of two afterwards."""
    scale = math_.raw_scale(key)
    return math_.encode_e4m3(key / scale), torch.exp2(scale.log2().round())


def _other_flavour(path: Any, original: Block) -> Block:
    """Codes read as e4m3fnuz: half their value, in keys alone."""
    return lambda codes, scale: original(codes, scale) * 0.5


# read-back ----------------------------------------------------------------------------------------------------------


def _read(slot_of: Callable[[LayerInputs, Tensor], Tensor]) -> dict[str, Seed]:
    """Keys are read back from other slots: slot_of(inputs, slots) -> slots, all in the pool."""

    def layout(path: Any, original: Block) -> Block:
        def block(inputs: LayerInputs, trace: Trace) -> StageTensors:
            unpack = path.unpack_page
            path.unpack_page = lambda pages, pool, slots: unpack(pages, pool, slot_of(inputs, slots))
            try:
                made: StageTensors = original(inputs, trace)
            finally:
                del path.unpack_page
            return _finite(made)

        return block

    def index_k(path: Any, original: Block) -> Block:
        def block(inputs: LayerInputs, trace: Trace) -> StageTensors:
            made = original(inputs, trace)
            value = read_slots(made["raw"], slot_of(inputs, inputs.entry_slot)).float()
            return _finite({**made, "value": value})

        return block

    return {FP8: Seed("index_k", layout), BF16: Seed("index_k", index_k)}


def _finite(made: StageTensors) -> StageTensors:
    """Poison reads as 0: a fault must not be seen by its NaN alone."""
    return {name: part.nan_to_num(nan=0.0) if part.is_floating_point() else part for name, part in made.items()}


def _narrow_offset(inputs: LayerInputs, slots: Tensor) -> Tensor:
    """Page numbers come back from a byte offset made in 32 bits; a page outside the pool reads its last one."""
    offset = reported("s4-page-offset", "32-bit product")
    size, page = 64 * (inputs.config.index_head_dim + SCALE_BYTES), slots // inputs.page_size
    got: Tensor = offset((page + BIG_PAGE).int(), size) // size - BIG_PAGE
    return got.clamp(0, inputs.num_pages - 1) * inputs.page_size + slots % inputs.page_size


def _slot_as_page(inputs: LayerInputs, slots: Tensor) -> Tensor:
    return slots % inputs.num_pages * inputs.page_size


def _coarse_table(inputs: LayerInputs, slots: Tensor) -> Tensor:
    """The table is walked as if a page held twice as many entries: later pages are never reached."""
    out = slots.clone()
    for request, count in enumerate(inputs.entries):
        entry = torch.arange(count)
        page = inputs.page_table[request, entry // (2 * inputs.page_size)]
        first = inputs.entry_offset[request]
        out[first : first + count] = page * inputs.page_size + entry % inputs.page_size
    return out


def _neighbours_table(inputs: LayerInputs, slots: Tensor) -> Tensor:
    """Rows of the page table are one column further apart than the reader thinks."""
    flat, out = inputs.page_table.clamp_min(0).flatten(), slots.clone()
    width = inputs.page_table.shape[1] - 1
    for request, count in enumerate(inputs.entries):
        entry = torch.arange(count)
        page = flat[(request * width + entry // inputs.page_size).clamp_max(len(flat) - 1)]
        first = inputs.entry_offset[request]
        out[first : first + count] = page * inputs.page_size + entry % inputs.page_size
    return out


def _next_in_page(inputs: LayerInputs, slots: Tensor) -> Tensor:
    return slots // inputs.page_size * inputs.page_size + (slots + 1) % inputs.page_size


def _tiles() -> dict[str, Seed]:
    component = reported("s1-flat-and-tiled", "16 x 16 tiles read")

    def unpack(path: Any, original: Block) -> Block:
        def block(layout: Any, pool: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
            codes, scale = original(layout, pool, slots)
            return component(codes.float(), slots, len(pool)).to(torch.uint8), scale

        return block

    def index_k(path: Any, original: Block) -> Block:
        def block(inputs: LayerInputs, trace: Trace) -> StageTensors:
            made = original(inputs, trace)
            return {**made, "value": component(made["value"], inputs.entry_slot, inputs.num_pages)}

        return block

    return {FP8: Seed("unpack_page", unpack), BF16: Seed("index_k", index_k)}


def _interleaved(path: Any, original: Block) -> Block:
    """Rows of 128 codes and their scale, one after another, where the page holds all codes first."""

    def block(layout: Any, pool: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        rows = pool[:, : 64 * (layout.data_bytes + SCALE_BYTES)].reshape(-1, 64, layout.data_bytes + SCALE_BYTES)
        taken = rows[slots // 64, slots % 64]
        scale = taken[:, layout.data_bytes :].contiguous().view(torch.float32)
        codes = taken[:, : layout.data_bytes].contiguous()
        finite = (codes & 0x7F) != 0x7F
        return torch.where(finite, codes, 0), scale.nan_to_num(nan=1.0, posinf=1.0, neginf=1.0).clamp(-1, 1)

    return block


def _payload_stride(path: Any, original: Block) -> Block:
    """The reader takes pages as 16,384 bytes apart; the pool keeps other bytes behind each page."""

    def block(inputs: LayerInputs, trace: Trace) -> StageTensors:
        made = original(inputs, trace)
        flat = made["raw"].flatten()
        packed = flat[: len(flat) // PAGE_BYTES * PAGE_BYTES].view(-1, PAGE_BYTES)
        return _finite({**made, "value": read_slots(packed, inputs.entry_slot).float()})

    return block


def _padding_written() -> dict[str, Seed]:
    """A padding row, slot -1, is written to slot 0."""

    def pack(path: Any, original: Block) -> Block:
        def block(layout: Any, pool: Tensor, slots: Tensor, codes: Tensor, scale: Tensor) -> None:
            original(layout, pool, slots, codes, scale)
            original(layout, pool, slots[:1] * 0, codes[-1:], scale[-1:] * 2)

        return block

    def store(path: Any, original: Block) -> Block:
        def block(inputs: LayerInputs, pooled: Tensor, entries: Tensor, slots: Tensor, cache: Tensor) -> None:
            original(inputs, pooled, entries, slots, cache)
            original(inputs, pooled, entries[-1:], slots * 0, cache)

        return block

    return {FP8: Seed("pack_page", pack), BF16: Seed("store_step", store)}


def _history_lost() -> dict[str, Seed]:
    """Entries that were given pooled come back as zeros: index keys were not carried along with the latents."""

    def lost(inputs: LayerInputs) -> Tensor:
        old = [torch.arange(count) < given for count, given in zip(inputs.entries, inputs.prefix_entries, strict=True)]
        return torch.cat(old)

    def index_k(path: Any, original: Block) -> Block:
        def block(inputs: LayerInputs, trace: Trace) -> StageTensors:
            made = original(inputs, trace)
            gone = lost(inputs)[:, None]
            kept = {"raw", "scale"}
            return {name: part if name in kept else part.masked_fill(gone, 0) for name, part in made.items()}

        return block

    return {path: Seed("index_k", index_k) for path in (FP8, BF16)}


def _narrow_rows() -> dict[str, Seed]:
    """What is copied of a row is 16 bytes short: the last dims (bf16) or, past the codes, the scale (fp8)."""

    def unpack(path: Any, original: Block) -> Block:
        def block(layout: Any, pool: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
            codes, scale = original(layout, pool, slots)
            return codes, scale.roll(1, 0)

        return block

    def index_k(path: Any, original: Block) -> Block:
        def block(inputs: LayerInputs, trace: Trace) -> StageTensors:
            made = original(inputs, trace)
            value = made["value"].clone()
            value[:, SHORT_ROW:] = 0.0
            return {**made, "value": value}

        return block

    return {FP8: Seed("unpack_page", unpack), BF16: Seed("index_k", index_k)}


def _no_hadamard() -> dict[str, Seed]:
    """No transform, of keys nor of queries."""
    key, query = keys(partial(make_key, hadamard=_identity)), queries(partial(make_query, hadamard=_identity))

    def stage(path: Any, original: Block) -> Block:
        def block(stage: StageName, inputs: LayerInputs, trace: Trace) -> StageTensors:
            seed = (key if stage == "index_k" else query)[BF16]
            with replaced(path, seed.block, seed.wrap):
                made: StageTensors = original(stage, inputs, trace)
            return made

        return block

    return {FP8: Seed("hadamard", lambda path, original: _identity), BF16: Seed("stage", stage)}


def _rotated(fault: str, report: str = "n3-entry-position") -> dict[str, Seed]:
    return keys(as_key(reported(report, fault)))


def _turned(report: str, fault: str) -> dict[str, Seed]:
    return keys(partial(make_key, rotate=as_rotation(reported(report, fault))))


def _key(name: str, report: str, seeds: Any, says: str, **rest: Any) -> Mutant:
    return Mutant(name, report, "index_k", rest.pop("case", CHUNKED), seeds, says, **rest)


KEY_MUTANTS = (
    _key("n1-half-split-key", "N1", _turned("n1-pairs", "half-split pairs"), "pairs (i, i + 32) in keys"),
    _key("n2-plain-base-key", "N2", _turned("n2-base-by-layer-kind", "base 10,000 everywhere"), "base 10,000 for keys"),
    _key("n2-no-yarn-key", "N2", _turned("n2-base-by-layer-kind", "no YaRN"), "keys rotated without YaRN"),
    _key("n2-inverse-key", "N2", keys(partial(make_key, rotate=_inverse_rotation)), "keys rotated backwards"),
    _key("n3-entry-as-position", "N3", _rotated("entry number as position"), "entry e rotated at e"),
    _key("n3-last-token", "N3", _rotated("position of the last token"), "entry e rotated at 4e + 3"),
    _key("n3-not-rotated", "N3", _rotated("not rotated"), "keys not rotated"),
    _key(
        "n5-no-hadamard",
        "N5",
        _no_hadamard(),
        "no Hadamard transform, on either side",
        also=("index_q",),
    ),
    _key("n5-hadamard-query-only", "N5", keys(partial(make_key, hadamard=_identity)), "Hadamard on queries alone"),
    _key("n5-unscaled-hadamard", "N5", keys(partial(make_key, hadamard=_unscaled_hadamard)), "without 128^-1/2"),
    _key("n6-norm-weight-bf16", "N6", keys(partial(make_key, norm=_rounded_weight)), "norm weight read as bf16"),
    _key("n7-layer-norm", "N7", keys(partial(make_key, norm=_layer_norm)), "the mean is subtracted"),
    _key("n7-eps", "N7", keys(partial(make_key, norm=_large_eps)), "eps ten times as large"),
    _key("n7-one-plus-weight", "N7", keys(partial(make_key, norm=_half_weight)), "norm weight read as 1 + weight"),
    _key("d2-bf16-after-norm", "D2", keys(_rounded_steps), "normed key rounded to bf16, undeclared"),
    _key(
        "n9-truncated-key",
        "N9",
        merged({FP8: _codes(_truncated_codes)}, {BF16: keys(_chopped_keys)[BF16]}),
        "stored by truncation instead of rounding",
    ),
    _key("q1-other-flavour", "Q1", {FP8: Seed("dequantise", _other_flavour)}, "e4m3fn read as e4m3fnuz: half"),
    _key("q1-pow2-scale", "Q1", {FP8: _codes(_pow2_scale)}, "scale rounded up to a power of two"),
    _key("q1-scale-after-codes", "Q1", {FP8: _codes(_scale_after_rounding)}, "scale rounded after the codes were made"),
    _key("q3-no-floor", "Q3", {FP8: _codes(_no_floor)}, "no floor under the scale", case=FLOOR),
    _key("s1-tiled-reader", "S1", _tiles(), "written flat, read in tiles of 16 x 16"),
    _key("s2-interleaved-scales", "S2", {FP8: Seed("unpack_page", _interleaved)}, "scales read behind each row"),
    _key("s2-payload-stride", "S2", {BF16: Seed("index_k", _payload_stride)}, "padding behind pages not skipped"),
    _key("s4-narrow-offset", "S4", _read(_narrow_offset), "32-bit page offset"),
    _key("s5-slot-as-page", "S5", _read(_slot_as_page), "page buffer indexed by slot"),
    _key("s6-padding-written", "S6", _padding_written(), "a padding row lands in slot 0", case=DECODE),
    _key("s7-history-lost", "S7", _history_lost(), "index keys not restored with the latents", case=DECODE),
    _key("s8-narrow-rows", "S8", _narrow_rows(), "copied rows are 16 bytes short"),
    _key("s9-coarse-table", "S9", _read(_coarse_table), "block table of another granularity"),
    _key("s2-next-entry", "S2", _read(_next_in_page), "the entry after, within each page"),
    _key("t11-table-stride", "T11", _read(_neighbours_table), "page-table stride of another call"),
)
