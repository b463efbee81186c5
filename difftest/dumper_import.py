"""Reads directories written by SGLang's dumper (sglang/srt/debug_utils/dumper.py, 0.5.23) as per-request hidden states.

The dumper writes one `.pt` file a tensor, named `step=1___rank=0___dump_index=7___name=positions___...pt`, that holds
{"value": tensor, "meta": {...}}. Files are read with `weights_only`, so nothing in them is executed, and only those
whose name is asked for are opened. Needed of every step: `positions`, `seq_lens`, `req_pool_indices`, and of every
layer the hidden states that enter its attention (`layers.N.self_attn` inputs of the dumper's mode `all`, or a tensor
dumped as `attn_input`).
"""

import pickle
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from .reference.inputs import Span, Step

CORE = ("positions", "seq_lens", "req_pool_indices")
HIDDEN = re.compile(r"(?:^attn_input|layers\.(\d+)\.self_attn\.inputs\.(?:0|x|hidden_states))$")
Q_LATENT = re.compile(r"(?:^q_latent|layers\.(\d+)\.self_attn\.q_norm\.output)$")


@dataclass(frozen=True)
class Dumped:
    """One file of a dump: its step, the tensor's name, its layer (-1 when it belongs to none)."""

    file: Path
    step: int
    name: str
    layer: int


@dataclass
class Request:
    """One request put together over steps. `spans` are (step, start, stop) of its tokens."""

    spans: list[tuple[int, int, int]] = field(default_factory=list)
    hidden: dict[int, list[Tensor]] = field(default_factory=dict)
    q_latent: dict[int, list[Tensor]] = field(default_factory=dict)

    @property
    def length(self) -> int:
        return self.spans[-1][2] if self.spans else 0


@dataclass(frozen=True)
class Traffic:
    """The chosen requests of a dump, ready for `make_inputs`: lengths, steps, and per layer a tensor a request.

    hidden[layer][request] [length, hidden_size] bf16; q_latent likewise, for the layers that have it.
    """

    lengths: tuple[int, ...]
    steps: tuple[Step, ...]
    hidden: dict[int, list[Tensor]]
    q_latent: dict[int, list[Tensor]]


def scan(folder: Path, rank: int) -> list[Dumped]:
    """The files of `rank` whose names are wanted, by step. ValueError when there is none."""
    found = []
    for file in sorted(folder.rglob("*.pt")):
        tags = dict(part.split("=", 1) for part in file.stem.split("___") if "=" in part)
        name, layer = tags.get("name", ""), tags.get("layer_id", "-1")
        match = HIDDEN.search(name) or Q_LATENT.search(name)
        if tags.get("rank") != str(rank) or not (match or name in CORE):
            continue
        layer = match.group(1) if match and match.group(1) else layer
        found.append(Dumped(file, int(tags.get("step", 0)), name, int(layer) if match else -1))
    if not found:
        raise ValueError(f"{folder} holds no dump of rank {rank} with {', '.join(CORE)} or attention inputs")
    return sorted(found, key=lambda dumped: dumped.step)


def read_value(file: Path) -> Tensor:
    """The tensor of one dumped file. ValueError names the file when it holds anything but plain tensors and values."""
    try:
        stored = torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{file} is not a plain tensor dump and was not executed: {first}") from error
    value = stored.get("value") if isinstance(stored, dict) else stored
    if not isinstance(value, Tensor):
        raise ValueError(f"{file} holds a {type(value).__name__}, not a tensor")
    return value


def read_traffic(folder: Path, layers: tuple[int, ...] = (), rank: int = 0, requests: int = 1) -> Traffic:
    """The `requests` longest requests of a dump, put together over its steps.

    `layers` empty means every layer with hidden states. A request whose beginning is not in the dump (its prefix came
    from the cache) is left out. ValueError names the step and the tensor that is missing or does not fit.
    """
    dumps = scan(folder, rank)
    by_step: dict[int, list[Dumped]] = {}
    for dumped in dumps:
        by_step.setdefault(dumped.step, []).append(dumped)
    everyone: list[Request] = []
    current: dict[int, Request] = {}
    for step, files in by_step.items():
        _take_step(step, files, set(layers), current, everyone)
    chosen = sorted(everyone, key=lambda request: -request.length)[:requests]
    if not chosen:
        raise ValueError(f"{folder} holds no request from its first token on; serve with --disable-radix-cache")
    if not chosen[0].hidden:
        raise ValueError(
            f"{folder} holds no hidden states of layers {list(layers) or 'any'}; dump attn_input of each layer"
        )
    present = sorted(set.intersection(*(set(request.hidden) for request in chosen)))
    missing = sorted(set(layers) - set(present))
    if missing:
        raise ValueError(f"{folder} holds no hidden states of layer {missing[0]}; it has {present}")
    return Traffic(
        tuple(request.length for request in chosen),
        _steps(chosen),
        {layer: [_joined(request, request.hidden[layer], layer) for request in chosen] for layer in present},
        {
            layer: [_joined(request, request.q_latent[layer], layer) for request in chosen]
            for layer in present
            if all(layer in request.q_latent for request in chosen)
        },
    )


def _take_step(
    step: int, files: list[Dumped], layers: set[int], current: dict[int, Request], everyone: list[Request]
) -> None:
    core = {dumped.name: read_value(dumped.file) for dumped in files if dumped.name in CORE}
    lacking = [name for name in CORE if name not in core]
    if lacking:
        raise ValueError(f"step {step} has no {lacking[0]}; dump {', '.join(CORE)} in every step")
    owners: list[tuple[Request, slice]] = []
    for pool, start, stop, rows in _spans(step, core):
        if start == 0:
            current[pool] = Request()
            everyone.append(current[pool])
        if pool not in current or current[pool].length != start:
            current.pop(pool, None)
            continue
        current[pool].spans.append((step, start, stop))
        owners.append((current[pool], rows))
    for dumped in files:
        if dumped.layer < 0 or (layers and dumped.layer not in layers):
            continue
        value = read_value(dumped.file)
        for request, rows in owners:
            into = request.hidden if HIDDEN.search(dumped.name) else request.q_latent
            if len(value) < rows.stop:
                raise ValueError(f"{dumped.file.name} has {len(value)} rows, positions has {rows.stop}")
            into.setdefault(dumped.layer, []).append(value[rows].to(torch.bfloat16))


def _spans(step: int, core: dict[str, Tensor]) -> Iterator[tuple[int, int, int, slice]]:
    """(pool index, start, stop, rows) of every request of a step: its rows are consecutive up to its seq_len."""
    positions, row = core["positions"].flatten().tolist(), 0
    for pool, length in zip(core["req_pool_indices"].tolist(), core["seq_lens"].tolist(), strict=True):
        first = row
        while row < len(positions) and positions[row] != length - 1:
            row += 1
        row += 1
        span = positions[first:row]
        if not span or span != list(range(span[0], length)):
            raise ValueError(f"step {step}: positions do not lead up to seq_lens {length} of request slot {pool}")
        yield pool, span[0], length, slice(first, row)


def _joined(request: Request, pieces: list[Tensor], layer: int) -> Tensor:
    tokens = torch.cat(pieces)
    if len(tokens) != request.length:
        raise ValueError(f"layer {layer} has {len(tokens)} of {request.length} tokens: a step lacks its tensor")
    return tokens


def _steps(chosen: list[Request]) -> tuple[Step, ...]:
    """Steps of the chosen requests, renumbered; steps in which none of them took part are left out."""
    numbers = sorted({step for request in chosen for step, _, _ in request.spans})
    return tuple(
        tuple(
            Span(place, start, stop)
            for place, request in enumerate(chosen)
            for own, start, stop in request.spans
            if own == number
        )
        for number in numbers
    )
