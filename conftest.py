"""For every test here: GPU tests are skipped where there is no GPU, and workers share the cores instead of fighting."""

import os

import pytest
import torch

pytest_plugins = ["pytester"]


def pytest_configure() -> None:
    """Kernels of torch use this worker's share of the cores; two workers with all cores each take twice as long."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and torch sees none here"))
