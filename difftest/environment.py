"""What this machine is: versions and devices, written beside every result."""

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

PACKAGES = (
    "difftest",
    "torch",
    "triton",
    "sglang",
    "sgl-deep-gemm",
    "sglang-kernel",
    "sgl-flash-mla",
    "transformers",
    "numpy",
    "pytest",
)


def package_version(name: str) -> str:
    """Installed version of a distribution, or an empty string."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def environment() -> dict[str, str]:
    """Facts that can change a result: package versions, Python, processor, GPU and driver, commit of this checkout."""
    facts = {name: package_version(name) for name in PACKAGES}
    facts["python"] = platform.python_version()
    facts["machine"] = f"{platform.system()} {platform.machine()}"
    facts["gpu"] = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    facts["cuda"] = torch.version.cuda or ""
    facts["commit"] = _commit()
    return facts


def _commit() -> str:
    here = Path(__file__).resolve().parent
    try:
        done = subprocess.run(
            ["git", "-C", str(here), "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, timeout=5
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()
