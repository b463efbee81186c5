"""`difftest doctor`: what is here, what is missing, what each missing thing would add and how to install it."""

import shutil
import sys
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from .environment import package_version
from .paths.base import get_path, path_names


@dataclass(frozen=True)
class Check:
    """One line of the doctor's report. `ok` is None for something optional that is absent."""

    what: str
    ok: bool | None
    found: str
    do: str = ""


def _package(name: str, module: str, adds: str, install: str, required: bool = False) -> Check:
    found = package_version(name)
    if found:
        return Check(name, True, found)
    if find_spec(module):
        return Check(name, True, "present, version unknown")
    return Check(name, False if required else None, f"missing: {adds}", install)


def _gpu() -> Check:
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        return Check(
            "gpu", True, f"{torch.cuda.get_device_name()}, sm_{major}{minor}, {torch.cuda.device_count()} visible"
        )
    why = "this torch is built without CUDA" if not torch.version.cuda else "no CUDA device is visible"
    return Check("gpu", None, f"missing: {why}; sglang-fp8 runs from recordings, kernels under Triton's interpreter")


def checks() -> list[Check]:
    """Every check, in the order a newcomer needs them: Python, what must be there, what may be, then the paths."""
    python_ok = (3, 11) <= sys.version_info[:2] <= (3, 13)
    lines = [
        Check("python", python_ok, sys.version.split()[0], "" if python_ok else "use Python 3.11, 3.12 or 3.13"),
        _package("torch", "torch", "everything", "pip install 'torch>=2.11,<2.15'", required=True),
        _package("triton", "triton", "the bf16-k kernels", "pip install triton", required=True),
        _gpu(),
        _package("sglang", "sglang", "the live SGLang paths", "pip install 'difftest[sglang]'"),
        _package("sgl-deep-gemm", "deep_gemm", "live index scores", "pip install 'difftest[sglang]'"),
        _package("sglang-kernel", "sgl_kernel", "live top-k", "pip install 'difftest[sglang]'"),
        _package(
            "transformers", "transformers", "the second opinion on structure", "pip install 'difftest[transformers]'"
        ),
        Check(
            "nvcc",
            bool(shutil.which("nvcc")) or None,
            shutil.which("nvcc") or "missing: CUDA store, live SGLang builds",
        ),
    ]
    for name in path_names():
        try:
            available = get_path(name).availability()
            lines.append(Check(f"path {name}", available.ok or None, available.why or "ready", available.install))
        except Exception as error:
            lines.append(Check(f"path {name}", False, f"cannot be loaded: {error}", "fix the plugin or uninstall it"))
    return lines
