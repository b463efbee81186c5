"""Workers of `pytest -n`: how many, and the environment each starts with, before it imports anything."""

import os
from collections.abc import Mapping, Sequence

from .gpus import VISIBLE, Gpu, assign, visible_gpus, workers_per_gpu

MEMORY = "DIFFTEST_GPU_MEMORY"
"""Bytes of a worker's GPU that all its workers share, told to each worker."""
THREADS = "OMP_NUM_THREADS"
MOST_PER_GPU = 4
"""Workers on one GPU if its memory allows: one draws inputs on the CPU while another's kernels run."""
KEPT_FREE = 0.05
"""Share of the free memory that is not lent out, for fragmentation."""


def count(gpus: Sequence[Gpu], need: int, most: int = MOST_PER_GPU, cores: int | None = None) -> int:
    """Workers for `gpus` when the largest case needs `need` bytes: by memory, and no more than cores."""
    fitting = sum(workers_per_gpu(gpu, need, most) for gpu in gpus)
    return max(len(gpus), min(fitting, cores or os.cpu_count() or 1))


def specs(gpus: Sequence[Gpu], workers: int, environment: Mapping[str, str] | None = None) -> list[str]:
    """execnet specifications of the workers, each pinned to one of the caller's own devices by environment variables.

    execnet sets them before the worker runs any code. Threads are shared out unless the caller has fixed their number.
    """
    environment = os.environ if environment is None else environment
    cores = max(1, (os.cpu_count() or 1) // workers)
    found = []
    for gpu in assign(list(gpus), workers):
        parts = ["popen", f"env:{VISIBLE}={gpu.token}"]
        if gpu.free:
            parts.append(f"env:{MEMORY}={int(gpu.free * (1 - KEPT_FREE))}")
        if THREADS not in environment:
            parts.append(f"env:{THREADS}={cores}")
        found.append("//".join(parts))
    return found


def largest_need(profile: str, names: Sequence[str], layers: Sequence[int]) -> int:
    """Bytes that the largest of the chosen cases needs; 0 for names that are not built in."""
    from typing import cast

    from ..cases import registry
    from ..cases.case import Profile
    from .needs import memory_bytes

    known = registry.all_cases()
    cases = [known[name] for name in names if name in known] if names else registry.profile(cast(Profile, profile))
    return max((memory_bytes(case, layer) for case in cases for layer in layers or case.layers), default=0)


__all__ = ["MEMORY", "count", "largest_need", "specs", "visible_gpus"]
