"""Triton index query: RoPE and Hadamard fused, rounded once to bf16, or quantised to e4m3 with its scale."""

import torch
import triton.language as tl
from torch import Tensor

from .interpreter import E4M3_MAX, Kernel, e4m3_bits, interpreted, load_bf16, store_bf16
from .layout import ENTRY_DIM
from .rope import as_table
from .transform import hadamard, rotate

DIM = tl.constexpr(ENTRY_DIM)
HALF = tl.constexpr(ENTRY_DIM // 2)
CODE_MAX = tl.constexpr(E4M3_MAX)
SMALLEST_AMAX = tl.constexpr(1e-4)

COMPILED_ROWS = 8
INTERPRETED_ROWS = 2048
QUERY_WARPS = 4


@Kernel
def _query_kernel(
    query,
    table,
    positions,
    out,
    codes,
    scale,
    weight,
    weight_out,
    weight_scale,
    count,
    heads,
    ROWS: tl.constexpr,
    QUANTISE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < count
    if weight is not None:
        raw = load_bf16(weight + row, live, INTERPRETED).to(tl.float32)
        tl.store(weight_out + row, raw * weight_scale, mask=live)
    position = tl.load(positions + row // heads, mask=live, other=0).to(tl.int64)
    at = row.to(tl.int64)[:, None] * DIM + 2 * tl.arange(0, HALF)[None, :]
    mask = live[:, None]
    even = load_bf16(query + at, mask, INTERPRETED).to(tl.float32)
    odd = load_bf16(query + at + 1, mask, INTERPRETED).to(tl.float32)
    even, odd = rotate(even, odd, table, position, live)
    even, odd = hadamard(even, odd, ROWS)
    if QUANTISE:
        largest = tl.reduce(tl.maximum(tl.abs(even), tl.abs(odd)), 1, tl.standard._elementwise_max)
        step = tl.div_rn(tl.maximum(largest, SMALLEST_AMAX), CODE_MAX)
        tl.store(scale + row, step, mask=live)
        inverse = tl.div_rn(1.0, step)[:, None]
        even = tl.minimum(tl.maximum(even * inverse, -CODE_MAX), CODE_MAX)
        odd = tl.minimum(tl.maximum(odd * inverse, -CODE_MAX), CODE_MAX)
        tl.store(codes + at, e4m3_bits(even), mask=mask)
        tl.store(codes + at + 1, e4m3_bits(odd), mask=mask)
    else:
        store_bf16(out + at, even, mask, INTERPRETED)
        store_bf16(out + at + 1, odd, mask, INTERPRETED)


def index_query(query: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    """Index queries as the scorer reads them, bf16 [R, H, 128]: rotation of dims 64..127, Hadamard, one rounding.

    query [R, H, 128] bf16 after wq_b, table fp32 [P, 64] or complex64 [P, 32], positions [R] int (rows of the table).
    ValueError names an argument of the wrong shape or dtype.
    """
    return prepare_query(query, None, table, positions)[0]


def prepare_query(
    query: Tensor, weight: Tensor | None, table: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor | None]:
    """`index_query` and, in the same kernel, the head weights: (bf16 [R, H, 128], fp32 [R, H] or None for None).

    weight [R, H] bf16 after weights_proj; the result is float(weight) * 128^-0.5 * H^-0.5, the constant rounded to
    fp32.
    """
    check_query(query, weight, positions)
    out = torch.empty_like(query)
    scaled = None if weight is None else torch.empty(weight.shape, dtype=torch.float32, device=query.device)
    _launch(query, table, positions, out, None, None, weight, scaled)
    return out, scaled


def index_query_fp8(query: Tensor, table: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """The same, quantised: (e4m3fn codes uint8 [R, H, 128], scale fp32 [R, H]), scale = max(1e-4, amax) / 448.

    The scale belongs in the head weight (ReLU commutes with a positive factor), and `decode_e4m3(codes)` is the bf16
    query.
    """
    check_query(query, None, positions)
    codes = torch.empty(query.shape, dtype=torch.uint8, device=query.device)
    scale = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
    _launch(query, table, positions, None, codes, scale, None, None)
    return codes, scale


def decode_e4m3(codes: Tensor) -> Tensor:
    """E4m3fn codes uint8 as bf16, exact."""
    return codes.view(torch.float8_e4m3fn).to(torch.bfloat16)


def head_scale(heads: int) -> float:
    """Factor of every head weight: 128^-0.5 * H^-0.5."""
    return float(ENTRY_DIM**-0.5 * heads**-0.5)


def head_weight(weight: Tensor) -> Tensor:
    """Head weights fp32 [R, H] of `prepare_query` alone, in torch; weight [R, H] bf16."""
    return weight.to(torch.float32) * head_scale(weight.shape[-1])


def check_query(query: Tensor, weight: Tensor | None, positions: Tensor) -> None:
    """Raises ValueError unless the operands have the shapes and dtypes that `prepare_query` names."""
    if query.dtype != torch.bfloat16 or query.dim() != 3 or query.shape[2] != ENTRY_DIM or not query.is_contiguous():
        raise ValueError(f"query is {query.dtype} {list(query.shape)}: give contiguous bf16 [rows, heads, {ENTRY_DIM}]")
    if weight is not None and (
        weight.dtype != torch.bfloat16 or weight.shape != query.shape[:2] or not weight.is_contiguous()
    ):
        raise ValueError(f"weight is {weight.dtype} {list(weight.shape)}: give contiguous bf16 {list(query.shape[:2])}")
    if (
        positions.shape != query.shape[:1]
        or positions.dtype not in (torch.int32, torch.int64)
        or not positions.is_contiguous()
    ):
        raise ValueError(
            f"positions is {positions.dtype} {list(positions.shape)}: give contiguous int32 or int64 [{len(query)}]"
        )


def _launch(
    query: Tensor,
    table: Tensor,
    positions: Tensor,
    out: Tensor | None,
    codes: Tensor | None,
    scale: Tensor | None,
    weight: Tensor | None,
    weight_out: Tensor | None,
) -> None:
    count = query.shape[0] * query.shape[1]
    if not count:
        return
    plain = interpreted(query)
    rows = INTERPRETED_ROWS if plain else COMPILED_ROWS
    _query_kernel[(-(-count // rows),)](
        query,
        as_table(table),
        positions,
        out,
        codes,
        scale,
        weight,
        weight_out,
        head_scale(query.shape[1]),
        count,
        query.shape[1],
        ROWS=rows,
        QUANTISE=codes is not None,
        INTERPRETED=plain,
        num_warps=QUERY_WARPS,
    )
