"""The GPUs a run may use and which worker gets which, found without importing torch."""

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

VISIBLE = "CUDA_VISIBLE_DEVICES"
QUERY = ("index", "uuid", "memory.total", "memory.free")
MIB = 2**20
TIMEOUT = 10.0
"""Seconds that nvidia-smi may take; a driver that answers later is taken for absent."""


@dataclass(frozen=True)
class Gpu:
    """One GPU by the token that CUDA_VISIBLE_DEVICES takes, with its memory in bytes; 0 where nobody tells."""

    token: str
    total: int = 0
    free: int = 0


def visible_gpus(environment: Mapping[str, str] | None = None) -> list[Gpu]:
    """GPUs that the caller's environment lets a process see, in CUDA's order.

    The caller's CUDA_VISIBLE_DEVICES is never widened: its tokens (indices, GPU-... or MIG-... UUIDs) are returned as
    they are, up to the first invalid one as CUDA reads them. Unset, every GPU that nvidia-smi lists counts, by UUID.
    Empty where there is no nvidia-smi and the variable is unset.
    """
    environment = os.environ if environment is None else environment
    listed = _listed()
    if VISIBLE not in environment:
        return [Gpu(facts["uuid"], *_memory(facts)) for facts in listed]
    by_name = {facts[name]: facts for facts in listed for name in ("index", "uuid")}
    found = []
    for token in (part.strip() for part in environment[VISIBLE].split(",")):
        if not token or token.startswith("-"):
            break
        found.append(Gpu(token, *_memory(by_name.get(token, {}))))
    return found


def _listed() -> list[dict[str, str]]:
    """What nvidia-smi says of every GPU; empty without it."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    except (OSError, subprocess.TimeoutExpired):
        return []
    if done.returncode:
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
    return [dict(zip(QUERY, row, strict=True)) for row in rows if len(row) == len(QUERY)]


def _memory(facts: Mapping[str, str]) -> tuple[int, int]:
    total, free = (facts.get(name, "") for name in QUERY[2:])
    return tuple(int(text) * MIB if text.isdigit() else 0 for text in (total, free))  # type: ignore[return-value]


def workers_per_gpu(gpu: Gpu, need: int, most: int) -> int:
    """How many workers fit into a GPU's free memory at `need` bytes each: at least 1, at most `most`."""
    if not gpu.free or not need:
        return 1
    return max(1, min(most, gpu.free // need))


def assign(gpus: list[Gpu], workers: int) -> list[Gpu]:
    """The GPU of each worker, round robin, so that every GPU has a worker before any has two."""
    return [gpus[number % len(gpus)] for number in range(workers)]
