"""How much memory a path may take, and how much it took."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def limited(device: torch.device, share: float) -> Iterator[None]:
    """Inside, torch allocates at most `share` of a GPU's memory beyond what is allocated now; then it raises
    `torch.OutOfMemoryError`. Memory that kernels take without torch is not counted. On the CPU nothing is limited.
    """
    if device.type != "cuda" or share >= 1:
        yield
        return
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device).total_memory
    allowed = min(1.0, torch.cuda.memory_reserved(device) / total + share)
    torch.cuda.set_per_process_memory_fraction(allowed, device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def peak_bytes(device: torch.device, reset: bool = False) -> int:
    """Peak memory so far: of a CUDA device, else of this process. reset: starts a new peak there, at what is in use."""
    if device.type == "cuda":
        if reset:
            torch.cuda.reset_peak_memory_stats(device)
            return torch.cuda.memory_allocated(device)
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
