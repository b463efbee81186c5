"""Checkpoint reading against a synthetic checkpoint in the published form, and the inputs made from it."""

import importlib.util
import json
import struct
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from difftest.reference import oracle
from safetensors.torch import load_file, save_file

from difftest.capture import captured_case, validate
from difftest.layer_data import make_inputs, random_hidden
from difftest.weights import Checkpoint, dequantise_blocks


def _files() -> ModuleType:
    """The checkpoint writer beside this file: pytest's importlib mode puts no test folder on the path."""
    name = "difftest_checkpoint_files"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / "checkpoint_files.py")
        assert spec and spec.loader
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


write_checkpoint = _files().write_checkpoint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "flash")
    return tmp_path / "flash"


def replaced(folder: Path, name: str, tensor: torch.Tensor | None) -> None:
    """Rewrites the shard that holds `name` with another tensor, or without it."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shard = folder / index["weight_map"][name]
    tensors = load_file(shard)
    del tensors[name]
    if tensor is not None:
        tensors[name] = tensor
    save_file(tensors, shard)


def test_the_synthetic_header_is_the_published_one(folder: Path) -> None:
    """The dtype spelled in the file's own header: F8_E4M3 codes, F8_E8M0 scales, BF16 and F32."""
    dtypes: dict[str, str] = {}
    for shard in folder.glob("model-0000[12]*"):
        raw = shard.read_bytes()
        header = json.loads(raw[8 : 8 + struct.unpack("<Q", raw[:8])[0]])
        dtypes |= {name: entry["dtype"] for name, entry in header.items() if name != "__metadata__"}
    assert dtypes["layers.2.attn.indexer.wq_b.weight"] == "F8_E4M3"
    assert dtypes["layers.2.attn.indexer.wq_b.scale"] == "F8_E8M0"
    assert dtypes["layers.2.attn.indexer.compressor.wkv.weight"] == "BF16"
    assert dtypes["layers.2.attn.indexer.compressor.ape"] == "F32"


@pytest.mark.parametrize(("layer", "kind", "count"), [(1, "swa", 6), (2, "csa", 16), (3, "hca", 10)])
def test_a_layer_holds_what_its_kind_needs(folder: Path, layer: int, kind: str, count: int) -> None:
    weights = Checkpoint(folder).layer(layer)
    assert (weights.kind, len(weights.tensors)) == (kind, count)
    assert not any("experts" in name or "wo_" in name for name in weights.tensors)


def test_blocks_are_dequantised_exactly() -> None:
    """Every element by its own block's scale, also in the ragged last blocks: compared in fp64, bit for bit."""
    codes = (torch.randn(130, 200, generator=torch.Generator().manual_seed(0)) * 100).to(torch.float8_e4m3fn)
    scale = torch.tensor([[1.0, 2.0**-9], [4.0, 2.0**-20]])
    got = dequantise_blocks(codes, scale).double()
    for row, column in [(0, 0), (127, 127), (127, 128), (128, 0), (129, 199)]:
        assert got[row, column] == codes[row, column].double() * scale[row // 128, column // 128].double()
    assert torch.equal(got[:128, :128], codes[:128, :128].double())


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("attn.indexer.weights_proj.weight", None, "weights_proj.weight cannot be read"),
        ("attn.kv_norm.weight", torch.ones(128), "kv_norm.weight in .* is F32 .128., not BF16"),
        ("attn.indexer.compressor.ape", torch.zeros(8, 128), r"ape in .* is F32 \[8, 128\], not F32 \[4, 256\]"),
        ("attn.attn_sink", torch.tensor([0.0, torch.nan]), r"attn_sink\[1\] is nan"),
        ("attn.wq_b.scale", torch.full((2, 2), torch.nan).to(torch.float8_e8m0fnu), r"wq_b.scale\[0, 0\] is nan"),
        ("attn.wkv.scale", torch.ones(1, 1).to(torch.float8_e8m0fnu), "wkv.scale in"),
    ],
)
def test_a_bad_tensor_is_named(folder: Path, name: str, tensor: torch.Tensor | None, message: str) -> None:
    replaced(folder, f"layers.2.{name}", tensor)
    with pytest.raises(ValueError, match=message):
        Checkpoint(folder).layer(2)


def test_bad_folders_are_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no config.json"):
        Checkpoint(tmp_path)
    with pytest.raises(ValueError, match="layer 9 does not exist"):
        Checkpoint(folder).layer(9)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"layers.2.attn.attn_sink": "../../secret"}}))
    with pytest.raises(ValueError, match="outside its folder"):
        Checkpoint(folder)
    index.write_text("{")
    with pytest.raises(ValueError, match="is no safetensors index"):
        Checkpoint(folder)


@pytest.mark.parametrize("layer", [1, 2, 3])
def test_inputs_are_the_products_of_the_stored_weights(folder: Path, layer: int) -> None:
    """Every tensor recomputed in fp64 from the raw file. Bound: bf16 results may differ by one rounding (2^-8 relative)
    plus the fp32 sum's error, far below 2^-7; fp32 results by 256 * 2^-24 of the sum of absolute terms."""
    raw = {}
    for shard in folder.glob("model-0000[12]*"):
        raw |= {name: tensor for name, tensor in load_file(shard).items() if name.startswith(f"layers.{layer}.attn.")}
    raw = {name.removeprefix(f"layers.{layer}.attn."): tensor for name, tensor in raw.items()}
    source = Checkpoint(folder)
    case = captured_case("flash", (300, 140), layer, str(folder / "config.json"), 12)
    hidden = random_hidden(case, layer, 256)
    inputs = make_inputs(source.layer(layer), hidden, case)
    validate(inputs)

    def matrix(name: str) -> torch.Tensor:
        if f"{name}.scale" not in raw:
            return raw[f"{name}.weight"].double()
        scale = raw[f"{name}.scale"].double().repeat_interleave(128, 0).repeat_interleave(128, 1)
        codes = raw[f"{name}.weight"].double()
        return codes * scale[: codes.shape[0], : codes.shape[1]]

    row = -1
    request, position = int(inputs.row_request[row]), int(inputs.row_position[row])
    x = hidden[request][position].double()
    low = (matrix("wq_a") @ x).bfloat16().double()
    latent = low * torch.rsqrt(low.square().mean() + 1e-6) * raw["q_norm.weight"].double()
    close = {"rtol": 2**-6, "atol": 2**-6}
    torch.testing.assert_close(inputs.attn_query[row].double().flatten(), matrix("wq_b") @ latent, **close)
    own = inputs.window_kv[inputs.window_index[row, -1]].double()
    torch.testing.assert_close(own, matrix("wkv") @ x, **close)
    if layer == 2:
        torch.testing.assert_close(inputs.index_query[row].double().flatten(), matrix("indexer.wq_b") @ latent, **close)
        assert inputs.index is not None
        wkv, wgate = matrix("indexer.compressor.wkv"), matrix("indexer.compressor.wgate")
        got = inputs.index.kv_score[300 * request + position].double()
        torch.testing.assert_close(got, torch.cat([wkv @ x, wgate @ x]), rtol=1e-4, atol=1e-4)
        ape = raw["indexer.compressor.ape"]
        assert torch.equal(inputs.index.ape, torch.cat([ape[:, :128], ape[:, 128:]]))
        assert oracle.index_k(inputs, oracle.compressed(inputs)).isfinite().all()
    if layer == 3:
        assert inputs.main is not None
        assert torch.equal(inputs.main.ape, raw["compressor.ape"])


def test_experts_are_never_opened(folder: Path) -> None:
    assert (folder / "model-00003-of-00003.safetensors").read_bytes() == b"never opened"
    assert Checkpoint(folder).layers() == [1, 2, 3, 4]
    Checkpoint(folder).layer(4)
