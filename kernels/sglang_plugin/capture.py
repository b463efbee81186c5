"""Captures the inputs of chosen layers in chosen eager prefills of a running server.

A layer is tapped while SGLang prepares its attention: the outputs of its projections are copied to pinned memory on the
stream that computes them, and a thread of its own waits for the copies and writes the file. The serving thread never
waits for the device. Only requests whose tokens all arrive in the step are kept, since what a prefix left behind cannot
be had any more; graph capture and replay are never tapped.
"""

import logging
import os
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import PACKAGE, record
from .flags import CAPTURE_BYTES, CaptureFlags
from .switch import PluginError

logger = logging.getLogger(__name__)

WINDOW = "sliding_window"


@dataclass
class _Capture:
    flags: CaptureFlags
    seen: int = -1
    left: int = 0
    step: object = None
    work: "queue.Queue[_Pending]" = field(default_factory=queue.Queue)
    writer: threading.Thread | None = None


_active: _Capture | None = None


@dataclass(frozen=True)
class _Pending:
    """A layer whose copies may still be under way; `done` is recorded behind the last of them."""

    layer: record.Layer
    folder: Path
    done: Any


def start(flags: CaptureFlags) -> None:
    """Begins capturing in this process."""
    global _active
    _active = _Capture(flags, left=flags.bytes)


def stop() -> None:
    """Ends capturing and waits for what is being written."""
    global _active
    ending, _active = _active, None
    if ending is not None and ending.writer is not None:
        ending.work.join()


def around_layer(original: Any, layer: Any, x: Tensor, positions: Tensor, batch: Any, *rest: Any, **named: Any) -> Any:
    """AROUND `MQALayer._forward_prepare`: taps the layer if it is among the chosen ones of a chosen step.

    An exception of the capture is logged with this package's name and the layer, and ends capturing; serving goes on.
    """
    if _active is None or not _wanted(_active, layer, batch):
        return original(layer, x, positions, batch, *rest, **named)
    backend = named.get("attn_backend", rest[0] if rest else None)
    try:
        kept = _Kept.of(layer, batch, backend, _active.flags.rows, x.device)
    except Exception as error:
        _end(layer, error)
        return original(layer, x, positions, batch, *rest, **named)
    with _tapped(layer, kept):
        result = original(layer, x, positions, batch, *rest, **named)
    try:
        _keep(_active, layer, backend, kept)
    except Exception as error:
        _end(layer, error)
    return result


def _end(layer: Any, error: Exception) -> None:
    stop()
    failed = PluginError(f"{PACKAGE}: the capture of layer {layer.layer_id} failed and has ended: {error}")
    logger.error("%s", failed, exc_info=error)


def whole_requests(batch: Any) -> list[tuple[int, int]]:
    """(first token in the step, length) of each request whose tokens all arrive in this step; host values only."""
    if batch.extend_seq_lens_cpu is None or batch.extend_prefix_lens_cpu is None:
        return []
    found, first = [], 0
    for length, prefix in zip(batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu, strict=True):
        if int(prefix) == 0 and int(length) > 0:
            found.append((first, int(length)))
        first += int(length)
    return found


def _wanted(active: _Capture, layer: Any, batch: Any) -> bool:
    """Whether to tap this layer now. Counts a step when its first forward batch is seen."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    if batch.forward_mode != ForwardMode.EXTEND or not whole_requests(batch) or _graphs():
        return False
    chosen = active.flags.layers
    if chosen and layer.layer_id not in chosen:
        return False
    if not chosen and (layer.indexer is None or layer.compress_ratio != 4):
        return False
    if active.step is not batch:
        active.step, active.seen = batch, active.seen + 1
    elif not chosen:
        return False  # without a choice, the first layer with an indexer
    return active.seen in active.flags.steps


def _graphs() -> bool:
    """Whether this step is being captured into a graph, or runs as part of one."""
    from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.context import is_in_breakable_cuda_graph
    from sglang.srt.model_executor.runner_backend_utils.tc_piecewise_cuda_graph import is_in_tc_piecewise_cuda_graph
    from sglang.srt.model_executor.runner_utils.capture_mode import get_is_capture_mode

    return bool(
        get_is_capture_mode()
        or is_in_breakable_cuda_graph()
        or is_in_tc_piecewise_cuda_graph()
        or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
    )


@contextmanager
def _tapped(layer: Any, kept: "_Kept") -> Iterator[None]:
    """Copies the wanted rows of the layer's projections into `kept.taps` as soon as they are computed, since SGLang may
    rotate or normalise them in place.
    """
    indexer, handles, patched = layer.indexer, [], []

    def tap(module: Any, name: str, index: Tensor) -> None:
        def keep(_: Any, __: Any, output: Any) -> None:
            kept.taps[name] = (output[0] if isinstance(output, tuple) else output)[index]

        handles.append(module.register_forward_hook(keep))

    tap(layer.wq_b, "attn_query", kept.rows)
    tap(layer.wqkv_a if layer.fuse_wqa_wkv else layer.wkv, "latent", kept.window)
    if indexer is not None:
        tap(indexer.wq_b, "index_query", kept.rows)
        tap(indexer.weights_proj, "index_weight", kept.rows)
    for name, compressor in _compressors(layer):
        patched.append(compressor)
        _tap_compressor(compressor, name, kept)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for compressor in patched:
            del compressor.compute_kv_score  # the class's own again


def _compressors(layer: Any) -> list[tuple[str, Any]]:
    parts = (("main", layer.compressor), ("index", layer.indexer and layer.indexer.compressor))
    return [(name, compressor) for name, compressor in parts if compressor is not None]


def _tap_compressor(compressor: Any, name: str, kept: "_Kept") -> None:
    original = compressor.compute_kv_score

    def compute(*arguments: Any, **named: Any) -> Any:
        result = original(*arguments, **named)
        kept.taps[f"{name}.kv_score"] = result[kept.tokens].float()
        return result

    compressor.compute_kv_score = compute


def _keep(active: _Capture, layer: Any, backend: Any, kept: "_Kept") -> None:
    """Starts the copies to the host and queues the file, if it is within the limit on bytes."""
    tensors = _layer_tensors(layer, backend, kept)
    size = sum(tensor.nbytes for tensor in tensors.values())
    if size > active.left:
        logger.warning(
            "%s: layer %d of step %d takes %d bytes and %d of %s are left: not captured",
            PACKAGE,
            layer.layer_id,
            active.seen,
            size,
            active.left,
            CAPTURE_BYTES,
        )
        return
    active.left -= size
    host = {name: _to_host(tensor) for name, tensor in tensors.items()}
    done = torch.cuda.Event() if torch.cuda.is_available() else None
    if done is not None:
        done.record()
    name = f"step-{active.seen:04d}-layer-{layer.layer_id:02d}"
    lengths = tuple(length for _, length in kept.requests)
    captured = record.Layer(name, layer.layer_id, kept.config, lengths, host, "captured from a running SGLang")
    _queue(active, _Pending(captured, active.flags.folder / rank_name(), done))


def _layer_tensors(layer: Any, backend: Any, kept: "_Kept") -> dict[str, Tensor]:
    """Every tensor of `LayerInputs` by its dotted name, on the device where it was."""
    latent, rows = kept.taps["latent"], len(kept.rows)
    found = {
        "attn_query": kept.taps["attn_query"].view(rows, layer.n_local_heads, layer.head_dim),
        "window_kv": latent[..., layer.q_lora_rank :] if layer.fuse_wqa_wkv else latent,
        "attn_sink": _local_sink(layer).float(),
        "kv_norm_weight": layer.kv_norm.weight.float(),
        "page_table": _page_table(backend, kept.requests, latent.device),
        **kept.host,
    }
    if layer.indexer is not None:
        heads, dim = kept.config["index_n_heads"], kept.config["index_head_dim"]
        found["index_query"] = kept.taps["index_query"].view(rows, heads, dim)
        found["index_weight"] = kept.taps["index_weight"]
    for name, compressor in _compressors(layer):
        width = compressor.head_dim
        found[f"{name}.kv_score"] = kept.taps[f"{name}.kv_score"]
        found[f"{name}.ape"] = compressor.ape.view(-1, width).float()
        found[f"{name}.norm_weight"] = compressor.norm.weight.float()
        found[f"{name}.pooled_prefix"] = torch.empty(0, width)
    return found


@dataclass(frozen=True)
class _Kept:
    """What is kept of a step: all `tokens` of its whole requests, `rows` that are compared, `window` latents (int64
    numbers of tokens in the step, on the device), their places on the host, the constants, and the taps as they fill.
    """

    requests: list[tuple[int, int]]
    config: dict[str, Any]
    tokens: Tensor
    rows: Tensor
    window: Tensor
    host: dict[str, Tensor]
    taps: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, layer: Any, batch: Any, backend: Any, rows: int, device: torch.device) -> "_Kept":
        """The last rows of every request, about `rows` in all, and the latents in their windows."""
        requests = whole_requests(batch)
        config = record.constants(backend.model_runner.model_config.hf_text_config, layer.n_local_heads)
        packed = _places(requests, rows, int(config[WINDOW]))
        tokens, kept, window = (packed.pop(name).to(device, non_blocking=True) for name in ("tokens", "rows", "window"))
        return cls(requests, config, tokens, kept, window, host=packed)


def _places(requests: list[tuple[int, int]], rows: int, reach: int) -> dict[str, Tensor]:
    """Int64 numbers of the step's `tokens`, `rows` and `window` latents; other names are fields of `LayerInputs`."""
    share = max(1, rows // len(requests))
    parts: dict[str, list[Tensor]] = {}

    def add(**pieces: Tensor) -> None:
        for name, piece in pieces.items():
            parts.setdefault(name, []).append(piece)

    kept = 0
    for request, (first, length) in enumerate(requests):
        position = torch.arange(max(0, length - share), length)
        seen = torch.arange(max(0, int(position[0]) - reach + 1), length)
        back = position[:, None] - torch.arange(reach - 1, -1, -1)[None, :]
        add(tokens=first + torch.arange(length), rows=first + position, window=first + seen)
        add(row_request=torch.full_like(position, request), row_position=position)
        add(window_request=torch.full_like(seen, request), window_position=seen)
        add(window_index=torch.where(back < 0, -1, back - seen[0] + kept))
        kept += len(seen)
    return {name: torch.cat(pieces) for name, pieces in parts.items()}


def _local_sink(layer: Any) -> Tensor:
    sink: Tensor = layer._local_attn_sink(None)
    return sink[: layer.n_local_heads]


def _page_table(backend: Any, requests: list[tuple[int, int]], device: torch.device) -> Tensor:
    """int64 [requests, pages] of the server: the row of each request's first token."""
    table: Tensor = backend.forward_metadata.core_metadata.page_table
    first = torch.tensor([start for start, _ in requests]).to(device, non_blocking=True)
    width = max(-(-(length // 4) // record.PAGE_ENTRIES) for _, length in requests)
    return table[first, : max(1, width)].long()


def _to_host(tensor: Tensor) -> Tensor:
    """A copy in host memory; one from the device is pinned and may still be under way."""
    tensor = tensor.detach()
    if not tensor.is_cuda:
        return tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def _queue(active: _Capture, pending: _Pending) -> None:
    if active.writer is None:
        active.writer = threading.Thread(target=_write_all, args=(active.work,), daemon=True, name="difftest-capture")
        active.writer.start()
    active.work.put(pending)


def _write_all(work: "queue.Queue[_Pending]") -> None:
    while True:
        pending = work.get()
        try:
            if pending.done is not None:
                pending.done.synchronize()
            logger.info("%s: wrote %s", PACKAGE, record.write(pending.layer, pending.folder))
        except Exception:
            logger.exception("%s: the capture of layer %d could not be written", PACKAGE, pending.layer.layer)
        finally:
            work.task_done()


def rank_name() -> str:
    """Folder of this process: its torch.distributed rank, or its process number where it has none."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return f"rank-{torch.distributed.get_rank()}"
    return f"process-{os.getpid()}"
