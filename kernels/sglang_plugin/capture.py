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
    taps: dict[str, Tensor] = {}
    with _tapped(layer, taps):
        result = original(layer, x, positions, batch, *rest, **named)
    try:
        _keep(_active, layer, batch, backend, taps)
    except Exception as error:
        stop()
        failed = PluginError(f"{PACKAGE}: the capture of layer {layer.layer_id} failed and has ended: {error}")
        logger.error("%s", failed, exc_info=error)
    return result


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
def _tapped(layer: Any, taps: dict[str, Tensor]) -> Iterator[None]:
    """Keeps the outputs of the layer's projections in `taps` for the length of the block."""
    indexer, handles, patched = layer.indexer, [], []

    def tap(module: Any, name: str) -> None:
        def keep(_: Any, __: Any, output: Any) -> None:
            taps[name] = output[0] if isinstance(output, tuple) else output

        handles.append(module.register_forward_hook(keep))

    tap(layer.wq_b, "attn_query")
    tap(layer.wqkv_a if layer.fuse_wqa_wkv else layer.wkv, "latent")
    if indexer is not None:
        tap(indexer.wq_b, "index_query")
        tap(indexer.weights_proj, "index_weight")
    for name, compressor in (("main", layer.compressor), ("index", indexer and indexer.compressor)):
        if compressor is not None:
            patched.append(compressor)
            _tap_compressor(compressor, name, taps)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for compressor in patched:
            del compressor.compute_kv_score  # the class's own again


def _tap_compressor(compressor: Any, name: str, taps: dict[str, Tensor]) -> None:
    original = compressor.compute_kv_score

    def compute(*arguments: Any, **named: Any) -> Any:
        taps[f"{name}.kv_score"] = result = original(*arguments, **named)
        return result

    compressor.compute_kv_score = compute


def _keep(active: _Capture, layer: Any, batch: Any, backend: Any, taps: dict[str, Tensor]) -> None:
    """Cuts the taps down to the step's whole requests and chosen rows, starts the copies and queues the file."""
    model = backend.model_runner.model_config.hf_text_config
    config = record.constants(model, layer.n_local_heads)
    requests = whole_requests(batch)
    tensors = _layer_tensors(layer, backend, taps, requests, active.flags.rows, config)
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
    lengths = tuple(length for _, length in requests)
    captured = record.Layer(name, layer.layer_id, config, lengths, host, "captured from a running SGLang")
    _queue(active, _Pending(captured, active.flags.folder / rank_name(), done))


def _layer_tensors(
    layer: Any,
    backend: Any,
    taps: dict[str, Tensor],
    requests: list[tuple[int, int]],
    rows: int,
    config: dict[str, Any],
) -> dict[str, Tensor]:
    """Every tensor of `LayerInputs` by its dotted name, on the device where it was."""
    device = taps["latent"].device
    plan = _Rows.of(requests, rows, int(config[WINDOW]))
    tokens, row, window = (index.to(device, non_blocking=True) for index in (plan.tokens, plan.rows, plan.window))
    latent = taps["latent"][..., layer.q_lora_rank :] if layer.fuse_wqa_wkv else taps["latent"]
    found = {
        "attn_query": taps["attn_query"][row].view(len(row), layer.n_local_heads, layer.head_dim),
        "window_kv": latent[window],
        "attn_sink": _local_sink(layer).float(),
        "kv_norm_weight": layer.kv_norm.weight.float(),
        "page_table": _page_table(backend, requests, device),
        **plan.host,
    }
    if layer.indexer is not None:
        heads, dim = config["index_n_heads"], config["index_head_dim"]
        found["index_query"] = taps["index_query"][row].view(len(row), heads, dim)
        found["index_weight"] = taps["index_weight"][row]
    for name, compressor in (("main", layer.compressor), ("index", layer.indexer and layer.indexer.compressor)):
        if compressor is not None:
            width = compressor.head_dim
            found[f"{name}.kv_score"] = taps[f"{name}.kv_score"][tokens].float()
            found[f"{name}.ape"] = compressor.ape.view(-1, width).float()
            found[f"{name}.norm_weight"] = compressor.norm.weight.float()
            found[f"{name}.pooled_prefix"] = torch.empty(0, width)
    return found


@dataclass(frozen=True)
class _Rows:
    """Which tokens of a step are kept: all `tokens` of the requests, `rows` that are compared, `window` latents."""

    tokens: Tensor
    rows: Tensor
    window: Tensor
    host: dict[str, Tensor]

    @classmethod
    def of(cls, requests: list[tuple[int, int]], rows: int, reach: int) -> "_Rows":
        """The last rows of every request, about `rows` in all, and the latents in their windows of `reach` tokens."""
        share = max(1, rows // len(requests))
        names = ("tokens", "rows", "window", "index", "row_request", "row_position", "seen_request", "seen_position")
        parts: dict[str, list[Tensor]] = {name: [] for name in names}
        kept = 0
        for request, (first, length) in enumerate(requests):
            position = torch.arange(max(0, length - share), length)
            seen = torch.arange(max(0, int(position[0]) - reach + 1), length)
            parts["tokens"].append(first + torch.arange(length))
            parts["rows"].append(first + position)
            parts["window"].append(first + seen)
            back = position[:, None] - torch.arange(reach - 1, -1, -1)[None, :]
            parts["index"].append(torch.where(back < 0, -1, back - seen[0] + kept))
            parts["row_request"].append(torch.full_like(position, request))
            parts["row_position"].append(position)
            parts["seen_request"].append(torch.full_like(seen, request))
            parts["seen_position"].append(seen)
            kept += len(seen)
        packed = {name: torch.cat(part) for name, part in parts.items()}
        host = {
            "row_request": packed["row_request"],
            "row_position": packed["row_position"],
            "window_request": packed["seen_request"],
            "window_position": packed["seen_position"],
            "window_index": packed["index"],
        }
        return cls(packed["tokens"], packed["rows"], packed["window"], host)


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
