"""The just-in-time builds: every architecture compiles, builds are kept, and failures say what to do."""

from pathlib import Path

import pytest
from difftest.kernels import cuda
from difftest.kernels.cuda import ARCHITECTURE_OF, ARCHITECTURES, SOURCES, architecture, build, find_nvcc
from difftest.kernels.tile import CACHE_VARIABLE

needs_nvcc = pytest.mark.skipif(find_nvcc() is None, reason="no nvcc here: the CUDA sources are not compiled")


@pytest.fixture(autouse=True)
def own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))


@needs_nvcc
@pytest.mark.parametrize(
    ("source", "arch"),
    [
        (path.name, arch)
        for path in sorted(SOURCES.glob("*.cu"))
        for arch in ([ARCHITECTURE_OF[path.name]] if path.name in ARCHITECTURE_OF else ARCHITECTURES)
    ],
)
def test_sources_compile_without_warnings(source: str, arch: str) -> None:
    cubin = build(SOURCES / source, arch)
    assert cubin.read_bytes().startswith(b"\x7fELF")


@needs_nvcc
def test_builds_are_kept_until_the_source_changes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = tmp_path / "k.cu"
    source.write_text('extern "C" __global__ void nothing() {}')
    first = build(source, "80")
    monkeypatch.setattr(cuda, "find_nvcc", lambda: None)
    assert build(source, "80") == first
    source.write_text('extern "C" __global__ void something() {}')
    with pytest.raises(RuntimeError, match="no nvcc here"):
        build(source, "80")


@needs_nvcc
def test_a_rejected_source_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    source = tmp_path / "broken.cu"
    source.write_text("int main( {")
    with pytest.raises(RuntimeError, match=r"nvcc rejects broken.cu for sm_80: .*error"):
        build(source, "80")
    assert not list(tmp_path.glob("broken-*"))


def test_architecture_names() -> None:
    assert [architecture(capability) for capability in ((8, 0), (8, 6), (9, 0), (10, 0), (12, 0))] == [
        "80",
        "86",
        "90a",
        "100a",
        "120a",
    ]


def test_nvcc_of_cuda_home_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert find_nvcc() == str(tmp_path / "bin" / "nvcc")
