"""Mutants of `kv`: latents, their format and their cache."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..paths import _sglang_math as math_
from ..reference.inputs import LayerInputs
from .adapters import both
from .bench_cases import CHUNKED, FLOOR, RESUMED
from .mutant import Block, Mutant, Wrap
from .pool_faults import no_bias, no_overlap_at_step, phase_of_chunk, window

BLOCK = 64


def _rounded_norm(path: Any, original: Block) -> Block:
    """Norm weights read as bf16."""
    return lambda x, weight, eps: original(x, weight.bfloat16().float(), eps)


def _entry_numbers(path: Any, original: Block) -> Block:
    return lambda inputs: original(inputs) // inputs.ratio


def _plain_base(path: Any, original: Block) -> Block:
    return lambda inputs, positions: math_.rope_table(inputs.config, "swa", positions)


def _half_split(path: Any, original: Block) -> Block:
    """Pairs (i, i + 32) of the RoPE dims."""

    def block(x: Tensor, table: Tensor) -> Tensor:
        width = 2 * table.shape[-2]
        order = torch.arange(width).view(2, -1).T.flatten()
        tail = original(x[..., -width:][..., order], table)
        return torch.cat((x[..., :-width], tail[..., order.argsort()]), -1)

    return block


def _not_rounded(path: Any, original: Block) -> Block:
    return lambda nope: nope


def _rounded(path: Any, original: Block) -> Block:
    return lambda nope: nope.bfloat16().float()


def _quantised(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Wrap:
    """change(codes, exponents) -> both, after `quantise_latent`."""

    def wrap(path: Any, original: Block) -> Block:
        return lambda nope: change(*original(nope))

    return wrap


def _next_exponent(codes: Tensor, exponents: Tensor) -> tuple[Tensor, Tensor]:
    return codes, exponents.roll(1, -1)


def _exponent_high(codes: Tensor, exponents: Tensor) -> tuple[Tensor, Tensor]:
    return codes, exponents + 1


def _small_scale(path: Any, original: Block) -> Block:
    """The exponent is rounded down, so the largest values saturate."""

    def block(nope: Tensor) -> tuple[Tensor, Tensor]:
        blocks = nope.reshape(len(nope), -1, BLOCK)
        exponents = math_.ue8m0_scale(blocks, math_.E4M3_MAX) - 1
        codes = math_.encode_e4m3(blocks / math_.decode_ue8m0(exponents).unsqueeze(-1))
        return codes.flatten(-2), exponents

    return block


def _no_floor(path: Any, original: Block) -> Block:
    def block(nope: Tensor) -> tuple[Tensor, Tensor]:
        blocks = nope.reshape(len(nope), -1, BLOCK)
        scale = torch.exp2((blocks.abs().amax(-1) / math_.E4M3_MAX).log2().ceil())
        codes = math_.encode_e4m3(blocks / scale.unsqueeze(-1))
        return codes.flatten(-2), math_.encode_ue8m0(scale)

    return block


def _chopped_tail(path: Any, original: Block) -> Block:
    """RoPE dims stored by truncation."""

    def block(layout: Any, pool: Tensor, slots: Tensor, source: Tensor, rope: Tensor) -> None:
        chopped = (rope.contiguous().view(torch.int32) & ~0xFFFF).view(torch.float32)
        original(layout, pool, slots, source, chopped)

    return block


def _next_slot(path: Any, original: Block) -> Block:
    """Latents are read back one entry off."""
    return lambda layout, pool, slots: original(layout, pool, slots.roll(1, 0))


def _window_as_compressed(path: Any, original: Block) -> Block:
    """Every entry of a page reads the page's first one, as from a table of page numbers."""
    return lambda layout, pool, slots: original(layout, pool, torch.where(slots % BLOCK == 1, slots - 1, slots))


def _stale_window(path: Any, original: Block) -> Block:
    def block(inputs: LayerInputs) -> tuple[Tensor, Tensor]:
        window_, raw = original(inputs)
        window_ = window_.clone()
        window_[-1] = window_[0]
        return window_, raw

    return block


def _latent(name: str, report: str, seeds: Any, says: str, **rest: Any) -> Mutant:
    return Mutant(name, report, "kv", rest.pop("case", CHUNKED), seeds, says, **rest)


LATENT_MUTANTS = (
    _latent("n1-half-split-latent", "N1", both("rotate", _half_split), "pairs (i, i + 32) in latents"),
    _latent("n2-plain-base-latent", "N2", both("rope_table", _plain_base), "base 10,000 for latents"),
    _latent("n3-latent-at-entry", "N3", both("entry_position", _entry_numbers), "compressed latent e rotated at e"),
    _latent("n6-latent-norm-bf16", "N6", both("norm", _rounded_norm), "norm weight of the compressor read as bf16"),
    _latent("c13-latent-phase", "C13", both("pool_span", phase_of_chunk), "gate bias by position in the step"),
    _latent("k3-latent-no-bias", "K3", both("pool", no_bias), "the main compressor's gate bias is never added"),
    _latent(
        "c7-latent-resume",
        "C7",
        both("read_window", window(no_overlap_at_step)),
        "the first latent after a resume forgets the block before",
        case=RESUMED,
    ),
    _latent("d32-latent-source", "D32", both("compressed_source", _not_rounded), "compressed latents from fp32"),
    _latent("d32-window-source", "D32", both("window_source", _rounded), "window latents from bf16"),
    _latent("d33-tail-truncated", "D33", both("store_latent", _chopped_tail), "RoPE dims truncated to bf16"),
    _latent("q1-latent-exponent", "Q1", both("quantise_latent", _quantised(_exponent_high)), "scale twice as large"),
    _latent(
        "s2-latent-scale-order", "S2", both("quantise_latent", _quantised(_next_exponent)), "scale of the next block"
    ),
    _latent("q1-latent-saturates", "Q1", both("quantise_latent", _small_scale), "scale rounded down"),
    _latent("q3-latent-no-floor", "Q3", both("quantise_latent", _no_floor), "no floor under the scale", case=FLOOR),
    _latent("s2-latent-neighbour", "S2", both("load_latent", _next_slot), "latents read one entry off"),
    _latent(
        "s9-latent-table", "S9", both("load_latent", _window_as_compressed), "a page's second entry reads the first"
    ),
    _latent("t13-stale-window", "T13", both("store_window", _stale_window), "the newest window token is a stale one"),
)
