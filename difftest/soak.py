"""Soak: clean seeds through every path, to show that no gate cries wolf."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

import torch

from .cases.case import Case, Mode
from .cases.draw import Draw
from .cases.families import FAMILIES
from .paths.base import get_path
from .policy import load_policy
from .runner import run_layer
from .verdict import judge

PATHS = (
    "oracle",
    "deepseek",
    "sglang-fp8-model",
    "sglang-fp8-model:accumulator=wgmma",
    "sglang-fp4-model",
    "bf16-k",
    "bf16-k:q=fp8",
    "bf16-k-naive",
)
"""Every built-in path that computes on a CPU, with the options that change its arithmetic."""

LAYERS = (2, 2, 2, 14, 28, 42, 3, 0)
"""A layer is one of these: mostly ones with an indexer, some of ratio 128, some with a window only."""

KINDS_FAMILIES = tuple(name for name in FAMILIES if name != "non-finite")
MODES: tuple[Mode, ...] = ("prefill", "chunked", "decode", "resume")
LENGTHS = (21, 521)
TOPK = (16, 32, 64)
BLOCK = 20
"""Seeds that one process takes at a time."""


@dataclass
class Soaked:
    """What a soak showed. `alarms`: every verdict `bug`, in its own words, with the recipe that makes it again."""

    seeds: int = 0
    layers: int = 0
    answers: Counter[str] = field(default_factory=Counter)
    alarms: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, other: "Soaked") -> None:
        self.seeds += other.seeds
        self.layers += other.layers
        self.answers += other.answers
        self.alarms += other.alarms


def recipe(seed: int) -> Case:
    """The small case of a seed: family, mode, lengths, rows, k and layer are drawn from it, and so is its data."""
    draw = Draw(seed)

    def one_of(name: str, count: int) -> int:
        return int(draw.integers(name, 0, count, 1)[0])

    layer = LAYERS[one_of("layer", len(LAYERS))]
    requests = 1 + one_of("requests", 3)
    lengths = tuple(int(length) for length in draw.integers("lengths", *LENGTHS, requests))
    return Case(
        f"soak-{seed}",
        KINDS_FAMILIES[one_of("family", len(KINDS_FAMILIES))],
        lengths,
        mode=MODES[one_of("mode", len(MODES))],
        chunk=17 + one_of("chunk", 200),
        decode_tokens=1 + one_of("decode", 4),
        rows=3 + one_of("rows", 8),
        layers=(layer,),
        spare_pages=one_of("spare", 4),
        overrides={
            "index_topk": TOPK[one_of("topk", len(TOPK))],
            "num_attention_heads": 4,
            "sliding_window": 16 + 16 * one_of("window", 3),
        },
    )


def soak_one(seed: int, paths: Sequence[str], policy: str) -> Soaked:
    """One seed through every path."""
    case, chosen = recipe(seed), load_policy(policy)
    made = Soaked(1)
    for result in run_layer(case, case.layers[0], [get_path(path) for path in paths]):
        [verdict] = judge(result.records, chosen)
        made.layers += 1
        made.answers[verdict.answer] += 1
        if verdict.answer == "bug":
            made.alarms.append(f"seed {seed}: {verdict}; recipe {case.to_json()}")
    return made


def soak(
    seeds: Sequence[int],
    paths: Sequence[str] = PATHS,
    *,
    policy: str = "default",
    jobs: int = 1,
    seconds: float = float("inf"),
    on_block: Callable[[Soaked], None] = lambda _: None,
) -> Soaked:
    """Runs clean seeds and counts verdicts. Stops after `seconds`, between blocks; `seeds` says how far it came."""
    total, started = Soaked(), time.monotonic()
    for block in _blocks(seeds, paths, policy, jobs, started + seconds):
        total.add(block)
        total.seconds = time.monotonic() - started
        on_block(total)
    return total


def _blocks(seeds: Sequence[int], paths: Sequence[str], policy: str, jobs: int, deadline: float) -> Iterator[Soaked]:
    parts = [seeds[at : at + BLOCK] for at in range(0, len(seeds), BLOCK)]
    if jobs == 1:
        for part in parts:
            if time.monotonic() < deadline:
                yield _block(part, paths, policy)
        return
    with ProcessPoolExecutor(jobs, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for at in range(0, len(parts), jobs):
            if time.monotonic() >= deadline:
                return
            running = [pool.submit(_block, part, paths, policy) for part in parts[at : at + jobs]]
            yield from (one.result() for one in running)


def _block(seeds: Sequence[int], paths: Sequence[str], policy: str) -> Soaked:
    total = Soaked()
    for seed in seeds:
        total.add(soak_one(seed, paths, policy))
    return total
