"""Runs one Triton source on the GPU (compiled) and on the CPU (interpreted), and proves the interpreter's traps.

Triton's interpreter is not a bf16 oracle. On bf16 it multiplies bit patterns in `tl.dot` and truncates on fp32 -> bf16;
its fp32 -> e4m3 cast is wrong below powers of two. Kernels of this folder therefore, when interpreted, load bf16 as
integers (`load_bf16`), compute in fp32 and round in integer arithmetic (`round_bf16`, `e4m3_bits`): the same bits
that a GPU gives. `traps()` shows which traps the installed Triton still has.

Written against `triton.runtime.interpreter` of Triton 3.6 and 3.9.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import GridExecutor, InterpretedFunction
from triton.runtime.jit import JITFunction

BF16_SHIFT = tl.constexpr(16)
BF16_QUIET_NAN = tl.constexpr(0x7FC0)
E4M3_MAX = 448.0
E4M3_MIN_NORMAL = tl.constexpr(2.0**-6)
E4M3_DROPPED_BITS = tl.constexpr(20)
E4M3_REBIAS = tl.constexpr((127 - 7) << 3)
E4M3_SUBNORMAL_STEP = tl.constexpr(2.0**-9)
FP32_INTEGER_STEP = tl.constexpr(2.0**23)


class _InPlaceExecutor(GridExecutor):  # type: ignore[misc]
    """The interpreter's launcher without its copies to and from the host: every tensor is there already."""

    def _init_args_hst(self, args_dev: Any, kwargs: Any) -> tuple[list[Any], dict[str, Any]]:
        return list(args_dev), dict(kwargs)

    def _restore_args_dev(self, args_dev: Any, args_hst: Any, kwargs: Any, kwargs_hst: Any) -> None:
        return None


class Kernel:
    """A Triton kernel for either device: `kernel[grid](...)` compiles for CUDA tensors and interprets for CPU
    tensors.
    """

    def __init__(self, source: Callable[..., Any]) -> None:
        self.compiled = JITFunction(source)
        self.interpreted = InterpretedFunction(source)
        self.__doc__ = source.__doc__

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def launch(*args: Any, **options: Any) -> Any:
            if any(isinstance(arg, torch.Tensor) and arg.is_cuda for arg in args):
                return self.compiled[grid](*args, **options)
            plain = self.interpreted
            return _InPlaceExecutor(plain.rewrite(), plain.arg_names, grid)(*args, **options)

        return launch


class Device(JITFunction):  # type: ignore[misc]
    """A Triton function called by kernels: inlined when compiled, called as Python when interpreted."""

    def __init__(self, source: Callable[..., Any]) -> None:
        super().__init__(source)
        self.interpreted = InterpretedFunction(source)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.interpreted.rewrite()(*args, **kwargs)


class _LoopBound(Device):
    """Interpreted, a loop bound has to be a Python integer: Triton 3.6 fails on its own one-element arrays under
    NumPy 2.
    """

    def __call__(self, value: Any) -> int:
        return int(value.handle.data.reshape(-1)[0]) if isinstance(value, tl.tensor) else int(value)


@_LoopBound
def loop_bound(value):
    """`value` itself, fit to bound a `tl.range`."""
    return value


def interpreted(tensor: torch.Tensor) -> bool:
    """Whether a kernel given `tensor` is interpreted."""
    return not tensor.is_cuda


NO_EVICTION = tl.constexpr("")
"""A default string has to be a `constexpr` already: Triton 3.6 wraps default numbers only."""


@Device
def load_bf16(pointer, mask, INTERPRETED: tl.constexpr, EVICTION: tl.constexpr = NO_EVICTION):
    """Loads bf16 (0 where masked); as fp32 when interpreted, so that no later step sees the interpreter's bf16.

    EVICTION: Triton's eviction policy.
    """
    if INTERPRETED:
        bits = tl.load(pointer.to(tl.pointer_type(tl.int16), bitcast=True), mask=mask, other=0)
        value = (bits.to(tl.int32) << BF16_SHIFT).to(tl.float32, bitcast=True)
    else:
        value = tl.load(pointer, mask=mask, other=0.0, eviction_policy=EVICTION)
    return value


@Device
def round_bf16(value):
    """Fp32 -> bf16 bits as int16, round to nearest even, in integer arithmetic; NaN becomes the quiet NaN."""
    bits = value.to(tl.int32, bitcast=True)
    even = (bits >> BF16_SHIFT) & 1
    rounded = (bits + 0x7FFF + even) >> BF16_SHIFT
    return tl.where(value == value, rounded, BF16_QUIET_NAN).to(tl.int16)


@Device
def store_bf16(pointer, value, mask, INTERPRETED: tl.constexpr):
    """Stores fp32 rounded to nearest even to bf16."""
    if INTERPRETED:
        tl.store(pointer.to(tl.pointer_type(tl.int16), bitcast=True), round_bf16(value), mask=mask)
    else:
        tl.store(pointer, value.to(tl.bfloat16), mask=mask)


@Device
def e4m3_bits(value):
    """Fp32 in [-448, 448] -> e4m3fn code as uint8, round to nearest even, in integer and fp32 arithmetic.

    Normal codes: drop 20 mantissa bits with the carry of round to nearest even, then rebias the exponent. Subnormal
    codes are multiples of 2^-9: adding 2^23 * 2^-9 lets the fp32 addition round to that step.
    """
    magnitude = tl.abs(value)
    bits = magnitude.to(tl.int32, bitcast=True)
    even = (bits >> E4M3_DROPPED_BITS) & 1
    normal = ((bits + 0x7FFFF + even) >> E4M3_DROPPED_BITS) - E4M3_REBIAS
    step = FP32_INTEGER_STEP * E4M3_SUBNORMAL_STEP
    subnormal = ((magnitude + step) - step) / E4M3_SUBNORMAL_STEP
    code = tl.where(magnitude < E4M3_MIN_NORMAL, subnormal.to(tl.int32), normal)
    sign = (value.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (code | sign).to(tl.uint8)


def _dot_of_bf16(a, b, out, N: tl.constexpr):
    row = tl.arange(0, N)
    at = row[:, None] * N + row[None, :]
    tl.store(out + at, tl.dot(tl.load(a + at), tl.load(b + at)))


def _cast_to_bf16(value, out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, tl.load(value + at).to(tl.bfloat16))


def _cast_to_e4m3(value, out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, tl.load(value + at).to(tl.float8e4nv).to(tl.uint8, bitcast=True))


def _round_as_kernels_do(value, bf16, codes, N: tl.constexpr):
    at = tl.arange(0, N)
    loaded = tl.load(value + at)
    store_bf16(bf16 + at, loaded, at < N, True)
    tl.store(codes + at, e4m3_bits(loaded))


def traps() -> dict[str, bool]:
    """Which traps the interpreter of the installed Triton has: plain use differs from torch on the CPU.

    Keys: `bf16 dot`, `bf16 cast`, `e4m3 cast`. True means that the plain spelling is wrong, so kernels must not use it.
    """
    size = 16
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(size, size, generator=generator).bfloat16() for _ in range(2))
    product = torch.empty(size, size)
    Kernel(_dot_of_bf16)[(1,)](a, b, product, N=size)
    values = torch.randn(256, generator=generator)
    as_bf16 = torch.empty(256, dtype=torch.bfloat16)
    as_e4m3 = torch.empty(256, dtype=torch.uint8)
    Kernel(_cast_to_bf16)[(1,)](values, as_bf16, N=256)
    Kernel(_cast_to_e4m3)[(1,)](values, as_e4m3, N=256)
    return {
        "bf16 dot": not torch.allclose(product, a.float() @ b.float(), rtol=1e-3, atol=1e-3),
        "bf16 cast": not torch.equal(as_bf16, values.bfloat16()),
        "e4m3 cast": not torch.equal(as_e4m3, values.to(torch.float8_e4m3fn).view(torch.uint8)),
    }


def round_in_kernel(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`values` fp32 [N], N a power of two, within +-448 for the codes: as (bf16 [N], e4m3fn codes uint8 [N])."""
    as_bf16 = torch.empty(len(values), dtype=torch.bfloat16)
    codes = torch.empty(len(values), dtype=torch.uint8)
    Kernel(_round_as_kernels_do)[(1,)](values, as_bf16, codes, N=triton.next_power_of_2(len(values)))
    return as_bf16, codes
