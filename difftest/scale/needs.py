"""What a unit of work (one case on one layer, through all paths) needs: device memory, from its shapes; and seconds."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .. import cases
from ..cases.case import Case

FP32, FP64 = 4, 8
TRACES = 3
"""Stage tensors alive at once: the oracle's, the path's, and the exact stage it is compared with."""
SCRATCH = 3 << 29
"""Bytes of a worker besides its tensors: CUDA context, kernels' workspaces, chunks of the exact stages (1.5 GiB)."""
COSTS = Path(cases.__path__[0]) / "costs.json"
SECONDS_OVERHEAD, BYTES_PER_SECOND = 0.3, 3e7
"""A unit without a recorded time: 0.3 s and a second for each 30 MB it holds, within a factor of FIT of what was
recorded on a CPU; on a GPU only the order counts."""
FIT = 2.5


@dataclass(frozen=True)
class Unit:
    """One case on one layer: the smallest piece that shards, budgets, workers and clusters hand out."""

    case: str
    layer: int

    @property
    def name(self) -> str:
        return f"{self.case}-layer{self.layer}"


def memory_bytes(case: Case, layer: int) -> int:
    """Device memory that running `case` on `layer` takes at its peak, in bytes, from the shapes of inputs and stages.

    Inputs: gate and key of both compressors, fp32. Stages, TRACES times in fp64: pooled and stored keys, query, scores,
    latents, attention output. Window latents are counted as a full window a row.
    """
    config = case.config
    ratio, width, dim = config.compress_ratios[layer], config.head_dim, config.index_head_dim
    tokens = sum(length - case.prefix_tokens(length) for length in case.lengths)
    entries = [length // ratio if ratio else 0 for length in case.lengths]
    rows = case.rows or sum(case.lengths)
    if case.mode == "decode":
        rows = case.decode_tokens * len(case.lengths)
    halves = 4 if ratio == 4 else 2
    inputs = FP32 * tokens * halves * (width + (dim if ratio == 4 else 0)) if ratio else 0
    stages = sum(entries) * width + rows * config.num_attention_heads * width
    stages += min(rows * config.sliding_window, sum(case.lengths)) * width
    if ratio == 4:
        stages += 2 * sum(entries) * dim + rows * config.index_n_heads * dim + rows * max(entries)
    return int(SCRATCH + inputs + FP64 * TRACES * stages)


def recorded_seconds(file: Path = COSTS) -> dict[str, float]:
    """Seconds of units by name, as measured; empty where nothing was recorded. ValueError for another kind of file."""
    if not file.is_file():
        return {}
    try:
        raw = json.loads(file.read_text())
        return {str(name): float(seconds) for name, seconds in raw["seconds"].items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{file} holds no recorded seconds ({error!r}); record them again") from error


def seconds(case: Case, layer: int, recorded: Mapping[str, float]) -> float:
    """Seconds the unit takes: as recorded for it or for other layers of its case, else estimated from its size."""
    name = Unit(case.id, layer).name
    if name in recorded:
        return recorded[name]
    siblings = [recorded[key] for key in (Unit(case.id, other).name for other in case.layers) if key in recorded]
    if siblings:
        return sum(siblings) / len(siblings)
    return SECONDS_OVERHEAD + (memory_bytes(case, layer) - SCRATCH) / BYTES_PER_SECOND
