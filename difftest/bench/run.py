"""The whole bench: ceilings, then every kernel in both formats, then what bf16 costs in capacity."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..environment import environment
from ..reference.config import load_config
from . import ceilings, preparation, reads
from .capacity import Capacity, capacity
from .operands import Pools
from .row import Ceilings, Row, rows_to_json
from .timing import ROUNDS, Contender, compare

SCHEMA = 1
QUICK_ROUNDS = 7
QUICK_SHAPES = ("64 x 16384", "8 x 16384")


@dataclass(frozen=True)
class Bench:
    """What a bench measured."""

    environment: dict[str, str]
    date: str
    ceilings: Ceilings
    rows: list[Row]
    capacity: Capacity

    def save(self, file: Path) -> None:
        """Writes JSON: ceilings, rows, capacity, environment and date."""
        file.write_text(json.dumps(self.to_json(), indent=1) + "\n")

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "date": self.date,
            "environment": self.environment,
            "ceilings": asdict(self.ceilings),
            "rows": rows_to_json(self.rows),
            "capacity": self.capacity.to_json(),
        }

    def throughput(self) -> str:
        """The cost of bf16 keys in time, from the decode reads."""
        found = [row for row in self.rows if row.kernel == "decode read" and row.format == "bf16" and row.ratio_to_fp8]
        if not found:
            return "Throughput: no fp8 kernel ran here, so bf16 reads have nothing to be compared with."
        parts = ", ".join(f"{row.ratio_to_fp8:.2f} at {row.shape}" for row in found)
        return f"Throughput: a bf16 read takes this many times the fp8 read: {parts}."


def groups(pools: Pools, quick: bool) -> Iterator[list[Contender]]:
    """Contenders that are measured in turn, group by group, made when their turn comes."""
    for shape in reads.DECODE_SHAPES:
        if not quick or shape.name in QUICK_SHAPES:
            yield reads.decode(pools, shape, tuned=not quick)
    yield from reads.prefill(pools, tuned=not quick)
    for entries in preparation.STORE_ENTRIES:
        yield preparation.stores(pools, entries)
    for count in preparation.QUERY_ROWS:
        yield preparation.queries(pools, count)
    yield reads.topk(pools)


def run(quick: bool, fraction: float, on_progress: Callable[[str], None] = lambda _: None) -> Bench:
    """Measures everything on the current CUDA device. quick: fewer shapes and rounds, tiles as recorded or default."""
    on_progress("ceilings")
    best = ceilings.measure()
    torch.cuda.empty_cache()
    pools, rows = Pools(), []
    for group in groups(pools, quick):
        on_progress(f"{group[0].kernel}, {group[0].shape}")
        rows.extend(compare(group, best, QUICK_ROUNDS if quick else ROUNDS))
        del group
        torch.cuda.empty_cache()
    card = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    made = capacity(load_config("v4-flash"), card, fraction)
    return Bench(environment(), time.strftime("%Y-%m-%d"), best, rows, made)
