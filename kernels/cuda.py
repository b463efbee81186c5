"""Builds a CUDA source of this package just in time and launches its kernels.

nvcc makes a cubin (no host code, no framework headers: about half a second) that is kept in the cache folder under a
hash of the source, the headers beside it and the architecture; the CUDA driver loads it. Nothing links against torch,
so one build serves every version.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import torch

from .tile import cache_folder

SOURCES = Path(__file__).parent / "csrc"
FLAGS = ("-cubin", "-O3", "-std=c++17", "-Werror", "all-warnings")
ARCHITECTURES = ("80", "90a", "100a", "120a")
"""What the sources are kept compiling for; any other architecture from 80 on is built when a device has it."""

ARCHITECTURE_OF = {"prefill.cu": "90a", "decode.cu": "90a"}
"""Sources for one architecture only; Triton serves the others."""

CUDA_HOME = Path("/usr/local/cuda")
PROGRAMMATIC_STREAM_SERIALIZATION = 6
"""`CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION` of the CUDA driver."""
FIRST_TO_OVERLAP = 9
"""Compute capability (major) from which kernels can start before the one ahead of them has ended."""
MAX_DYNAMIC_SHARED_SIZE = 8
"""`CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES` of the CUDA driver."""
STATIC_SHARED_LIMIT = 48 << 10
"""Shared memory of a block that needs no such attribute."""


def find_nvcc() -> str | None:
    """Path of nvcc: CUDA_HOME, then PATH, then /usr/local/cuda; None if there is none."""
    homes = [Path(os.environ["CUDA_HOME"])] if os.environ.get("CUDA_HOME") else []
    found = shutil.which("nvcc")
    for candidate in [
        *(home / "bin" / "nvcc" for home in homes),
        *([Path(found)] if found else []),
        CUDA_HOME / "bin/nvcc",
    ]:
        if candidate.is_file():
            return str(candidate)
    return None


def architecture(capability: tuple[int, int]) -> str:
    """nvcc's name for a compute capability; the architecture's own features (`a`) where a family has them."""
    name = f"{capability[0]}{capability[1]}"
    return f"{name}a" if f"{name}a" in ARCHITECTURES else name


def build(source: Path, arch: str) -> Path:
    """Cubin of `source` for `arch` ("90a"), from the cache folder or newly compiled.

    Raises RuntimeError if nvcc is missing or rejects the source, with its message.
    """
    texts = [source.read_bytes(), *(header.read_bytes() for header in sorted(source.parent.glob("*.cuh")))]
    digest = hashlib.sha256(b"\0".join((*texts, arch.encode(), *(flag.encode() for flag in FLAGS)))).hexdigest()
    cubin = cache_folder() / f"{source.stem}-{arch}-{digest[:16]}.cubin"
    if cubin.is_file():
        return cubin
    nvcc = find_nvcc()
    if nvcc is None:
        raise RuntimeError(
            "no nvcc here, which builds the CUDA kernels: install the CUDA toolkit or set CUDA_HOME, "
            "or use the Triton kernels"
        )
    cubin.parent.mkdir(parents=True, exist_ok=True)
    part = cubin.with_suffix(f".{os.getpid()}.part")
    command = [nvcc, *FLAGS, f"-gencode=arch=compute_{arch},code=sm_{arch}", str(source), "-o", str(part)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"nvcc rejects {source.name} for sm_{arch}: {(done.stderr or done.stdout).strip()}")
    part.replace(cubin)
    return cubin


@cache
def driver() -> ctypes.CDLL:
    """The CUDA driver library."""
    return ctypes.CDLL("libcuda.so.1")


def check(code: int, what: str) -> None:
    """RuntimeError naming `what` and the driver's error unless `code` is 0."""
    if code:
        name = ctypes.c_char_p()
        driver().cuGetErrorName(code, ctypes.byref(name))
        raise RuntimeError(f"{what} failed: {name.value.decode() if name.value else code}")


class _Attribute(ctypes.Structure):
    """`CUlaunchAttribute` with an integer value."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_ubyte * 60))


class _Configuration(ctypes.Structure):
    """`CUlaunchConfig`."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


class Kernels:
    """The kernels of one source on one device, built and loaded at the first launch."""

    def __init__(self, source: str, device: int) -> None:
        self.device = device
        capability = torch.cuda.get_device_capability(device)
        self._overlaps = capability[0] >= FIRST_TO_OVERLAP
        cubin = build(SOURCES / source, architecture(capability))
        self._enter()
        self._image = cubin.read_bytes()
        self._module = ctypes.c_void_p()
        check(driver().cuModuleLoadData(ctypes.byref(self._module), self._image), f"loading {cubin.name}")
        self._functions: dict[str, ctypes.c_void_p] = {}

    def _enter(self) -> None:
        """Makes the device's primary context current in this thread where none is."""
        current = ctypes.c_void_p()
        check(driver().cuCtxGetCurrent(ctypes.byref(current)), "reading the current context")
        if not current.value:
            torch.cuda.current_stream(self.device)
            context = ctypes.c_void_p()
            check(driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), self.device), "taking the primary context")
            check(driver().cuCtxSetCurrent(context), "entering the primary context")

    def _function(self, name: str, shared: int) -> ctypes.c_void_p:
        if name not in self._functions:
            function = ctypes.c_void_p()
            found = driver().cuModuleGetFunction(ctypes.byref(function), self._module, name.encode())
            check(found, f"finding kernel {name}")
            if shared > STATIC_SHARED_LIMIT:
                raised = driver().cuFuncSetAttribute(function, MAX_DYNAMIC_SHARED_SIZE, shared)
                check(raised, f"giving kernel {name} {shared} bytes of shared memory")
            self._functions[name] = function
        return self._functions[name]

    def launch(
        self, name: str, blocks: int, threads: int, *arguments: Any, shared: int = 0, overlap: bool = False
    ) -> None:
        """Runs a kernel on the current stream of the device; arguments are ctypes values in the kernel's order.

        shared: bytes of dynamic shared memory of a block. overlap: the kernel waits itself for the one ahead of it in
        the stream, and may start before that has ended (from sm_90 on).
        """
        with torch.cuda.device(self.device):
            self._enter()
            packed = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
            attribute = _Attribute(PROGRAMMATIC_STREAM_SERIALIZATION, 0, 1)
            configuration = _Configuration(
                grid=(blocks, 1, 1),
                block=(threads, 1, 1),
                shared=shared,
                stream=torch.cuda.current_stream().cuda_stream,
                attributes=ctypes.pointer(attribute),
                count=int(overlap and self._overlaps),
            )
            code = driver().cuLaunchKernelEx(
                ctypes.byref(configuration), self._function(name, shared), packed, ctypes.c_void_p()
            )
        check(code, f"launching {name}")


@cache
def kernels(source: str, device: int) -> Kernels:
    """The loaded kernels of `source` on `device`; one build and one load a process."""
    return Kernels(source, device)


def pointer(tensor: torch.Tensor | None) -> ctypes.c_void_p:
    """A tensor's address as a kernel argument; null for None."""
    return ctypes.c_void_p(0 if tensor is None else tensor.data_ptr())


class Index(ctypes.Structure):
    """Integers of 4 or 8 bytes, as the kernels' `Index` takes them."""

    _fields_ = (("data", ctypes.c_void_p), ("wide", ctypes.c_int64))


def index(tensor: torch.Tensor) -> Index:
    """An int32 or int64 tensor as a kernel argument."""
    return Index(tensor.data_ptr(), int(tensor.dtype == torch.int64))
