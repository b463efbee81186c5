"""Structural rules on stored tensors: broken ones are findings, to which no tolerance applies."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from .record import Finding
from .reference.inputs import CompressorInputs, LayerInputs
from .stages import STAGES, StageName

Locate = Callable[[tuple[int, ...]], dict[str, int]]


def place(index: Tensor) -> str:
    return ", ".join(str(int(part)) for part in index)


def all_finite(tensor: Tensor) -> bool:
    """Whether a tensor holds neither NaN nor infinity, in one pass and without a mask: both show in its extremes."""
    return not tensor.numel() or all(bool(torch.isfinite(end)) for end in torch.aminmax(tensor))


def not_finite(name: str, tensor: Tensor, locate: Locate | None = None) -> list[Finding]:
    """NaN and infinities of a tensor that must have none: how many, and the first one by name and position."""
    if all_finite(tensor):
        return []
    bad = ~torch.isfinite(tensor)
    first = bad.nonzero()[0]
    kind = "nan" if bool(tensor[tuple(first)].isnan()) else "inf"
    where = locate(tuple(int(part) for part in first)) if locate else {}
    count = int(bad.sum())
    return [Finding(kind, f"{tensor[tuple(first)].item()} at {name}[{place(first)}], {count} in all", where)]


def wrong_shape(stage: StageName, name: str, tensor: Tensor, want: tuple[int, ...]) -> list[Finding]:
    """A stage tensor of another shape than its contract."""
    if tuple(tensor.shape) == want:
        return []
    return [
        Finding("shape", f"{stage}.{name} is {list(tensor.shape)}, and {STAGES[stage].tensors[name]} is {list(want)}")
    ]


GRID_SHARE = 0.95
"""Share of values that must sit on a coarse grid for it to count as the tensor's own."""

GRID_SAMPLE = 16
"""Fewest values a grid is told from: by chance 16 random significands all end in 12 zero bits with 2^-192."""

FP32_LOW_BITS = 23
COARSE_BITS = 12
BF16_BITS = 16
"""Trailing zero bits of an fp32 significand that only an undeclared rounding to 12 significant bits or fewer leaves:
bf16 leaves 16, fp16 and TF32 leave 13."""


def trailing_zeros(value: Tensor) -> Tensor:
    """Trailing zero bits of the 23 stored significand bits of fp32 values, int64; 23 for powers of two and zero."""
    bits = value.float().contiguous().view(torch.int32).long() & ((1 << FP32_LOW_BITS) - 1)
    lowest = (bits & -bits).clamp(min=1).double().log2().long()
    return torch.where(bits == 0, FP32_LOW_BITS, lowest)


def granularity(name: str, got: Tensor, exact: Tensor, coarse: int = COARSE_BITS) -> list[Finding]:
    """Values declared fp32 that sit on a coarser grid although the exact values do not.

    A rounding smaller than the accumulator's bound cannot be seen element by element. It is seen in the bits: of the
    elements whose exact value needs more than 24 - `coarse` significant bits, an fp32 result ends in `coarse` zeros
    with probability 2^-coarse each. GRID_SHARE of at least GRID_SAMPLE doing so has probability below 1e-40.
    """
    fine = (trailing_zeros(exact) < coarse) & (got != 0) & got.isfinite()
    count = int(fine.sum())
    if count < GRID_SAMPLE:
        return []
    zeros = trailing_zeros(got[fine])
    if float((zeros >= coarse).double().mean()) < GRID_SHARE:
        return []
    typical = int(zeros.double().quantile(1 - GRID_SHARE)) if count < 1 << 20 else int(zeros[: 1 << 20].min())
    bits = FP32_LOW_BITS + 1 - max(typical, coarse)
    message = f"{count} values of {name} carry {bits} significant bits, and fp32 is declared: an undeclared rounding"
    return [Finding("granularity", message)]


def constant_rows(got: Tensor, exact: Tensor, visible: Tensor) -> list[Finding]:
    """Score rows whose visible values are all equal while the exact ones are not (all zeros, typically)."""
    if not got.shape[1]:
        return []
    shown = torch.arange(got.shape[1], device=got.device) < visible[:, None]

    def span(score: Tensor) -> Tensor:
        return score.masked_fill(~shown, -torch.inf).amax(1) - score.masked_fill(~shown, torch.inf).amin(1)

    flat = (visible > 1) & (span(got) == 0) & (span(exact) > 0)
    if not bool(flat.any()):
        return []
    row = int(flat.nonzero()[0])
    value = float(got[row, 0])
    message = f"row {row} holds {value:g} for all {int(visible[row])} visible entries; {int(flat.sum())} such rows"
    return [Finding("constant_row", message, {"row": row})]


def unmasked(got: Tensor, visible: Tensor) -> list[Finding]:
    """Score columns past a row's visible entries that are not -inf (contract K6)."""
    hidden = torch.arange(got.shape[1], device=got.device) >= visible[:, None]
    bad = hidden & (got != -torch.inf)
    if not bool(bad.any()):
        return []
    row, entry = (int(part) for part in bad.nonzero()[0])
    message = f"score[{row}, {entry}] is {float(got[row, entry]):g} past the row's {int(visible[row])} visible entries"
    return [Finding("mask", f"{message}; {int(bad.sum())} such values", {"row": row, "entry": entry})]


def _stage_inputs(stage: StageName, inputs: LayerInputs) -> Iterator[tuple[str, Tensor]]:
    """The input tensors that a stage reads by itself."""

    def compressor(name: str, parts: CompressorInputs | None, *wanted: str) -> Iterator[tuple[str, Tensor]]:
        if parts is not None:
            yield from ((f"{name}.{part}", getattr(parts, part)) for part in wanted)

    if stage == "compressed":
        yield from compressor("index", inputs.index, "kv_score", "ape", "pooled_prefix")
    elif stage == "index_k":
        yield from compressor("index", inputs.index, "norm_weight")
    elif stage == "kv":
        yield from compressor("main", inputs.main, "kv_score", "ape", "norm_weight", "pooled_prefix")
        yield from (("window_kv", inputs.window_kv), ("kv_norm_weight", inputs.kv_norm_weight))
    elif stage == "attention":
        yield from (("attn_query", inputs.attn_query), ("attn_sink", inputs.attn_sink))
    named = {"index_q": ("index_query", inputs.index_query), "head_weight": ("index_weight", inputs.index_weight)}
    if stage in named and named[stage][1] is not None:
        yield named[stage]  # type: ignore[misc]


def input_fault(stage: StageName, inputs: LayerInputs) -> str:
    """The first NaN or infinity in what the stage reads from the inputs, as "nan in index_query[3, 0, 7]", or ""."""
    for name, tensor in _stage_inputs(stage, inputs):
        if not all_finite(tensor):
            first = (~torch.isfinite(tensor)).nonzero()[0]
            return f"{tensor[tuple(first)].item()} in {name}[{place(first)}]"
    return ""
