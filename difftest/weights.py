"""Reads the attention, compressor and indexer tensors of single layers from a sharded DeepSeek-V4 checkpoint.

Names, dtypes and shapes are those of the published checkpoint: `layers.N.attn...`; an fp8 tensor `X.weight` comes with
`X.scale`, one ue8m0 exponent a 128 x 128 block. Tensors are read one at a time; experts are never opened.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .reference.config import LayerKind, ModelConfig, load_config

BLOCK = 128
"""Rows and columns of a weight that share one scale (`quantization_config.weight_block_size`)."""
INDEX_FILE, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"
Stored = Literal["F8_E4M3", "BF16", "F32"]


@dataclass(frozen=True)
class Expected:
    """A tensor of the checkpoint: its dtype as the safetensors header spells it, and its shape."""

    dtype: Stored
    shape: tuple[int, ...]


@dataclass(frozen=True)
class LayerWeights:
    """Weights of one layer by their name after `layers.N.attn.`: bf16 matrices, fp32 norms, gate biases and sinks.

    fp8 matrices are dequantised to bf16, exactly: e4m3 has four significant bits and the scale is a power of two.
    """

    config: ModelConfig
    layer: int
    kind: LayerKind
    tensors: dict[str, Tensor]

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]


def expected_tensors(config: ModelConfig, kind: LayerKind) -> dict[str, Expected]:
    """Tensors that a layer's inputs are made with, by name after `layers.N.attn.`."""
    hidden, rank, width = config.hidden_size, config.q_lora_rank, config.head_dim
    wanted = {
        "wq_a.weight": Expected("F8_E4M3", (rank, hidden)),
        "q_norm.weight": Expected("BF16", (rank,)),
        "wq_b.weight": Expected("F8_E4M3", (config.num_attention_heads * width, rank)),
        "wkv.weight": Expected("F8_E4M3", (width, hidden)),
        "kv_norm.weight": Expected("BF16", (width,)),
        "attn_sink": Expected("F32", (config.num_attention_heads,)),
    }
    if kind != "swa":
        wanted |= _compressor("compressor.", width, hidden, 4 if kind == "csa" else 128)
    if kind == "csa":
        heads, dim = config.index_n_heads, config.index_head_dim
        wanted["indexer.wq_b.weight"] = Expected("F8_E4M3", (heads * dim, rank))
        wanted["indexer.weights_proj.weight"] = Expected("BF16", (heads, hidden))
        wanted |= _compressor("indexer.compressor.", dim, hidden, 4)
    return wanted


def _compressor(prefix: str, width: int, hidden: int, ratio: int) -> dict[str, Expected]:
    """A compressor's tensors. With ratio 4 it is twice as wide: overlap half, then own half."""
    rows = 2 * width if ratio == 4 else width
    return {
        f"{prefix}ape": Expected("F32", (ratio, rows)),
        f"{prefix}norm.weight": Expected("BF16", (width,)),
        f"{prefix}wkv.weight": Expected("BF16", (rows, hidden)),
        f"{prefix}wgate.weight": Expected("BF16", (rows, hidden)),
    }


class Checkpoint:
    """A folder of safetensors shards with `config.json`. Every method's ValueError names the tensor and the fault."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not (folder / "config.json").is_file():
            raise ValueError(f"{folder} has no config.json; give the folder of a DeepSeek-V4 checkpoint")
        try:
            self.config = load_config(folder / "config.json")
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{folder / 'config.json'} is no DeepSeek-V4 config: {error!r}") from error
        self._shards = self._weight_map()

    def _weight_map(self) -> dict[str, str]:
        index = self.folder / INDEX_FILE
        if not index.is_file():
            single = self.folder / SINGLE_FILE
            if not single.is_file():
                raise ValueError(f"{self.folder} has neither {INDEX_FILE} nor {SINGLE_FILE}")
            with safe_open(single, framework="pt") as stored:
                return dict.fromkeys(stored.keys(), SINGLE_FILE)
        try:
            shards = json.loads(index.read_text())["weight_map"]
            found = {str(name): str(shard) for name, shard in shards.items()}
        except (ValueError, KeyError, AttributeError) as error:
            raise ValueError(f"{index} is no safetensors index: {error!r}") from error
        for name, shard in found.items():
            if Path(shard).name != shard:
                raise ValueError(f"{index} places {name} in {shard!r}, outside its folder")
        return found

    def layers(self) -> list[int]:
        """Layers whose tensors the checkpoint names."""
        numbers = (name.split(".")[1] for name in self._shards if name.startswith("layers."))
        return sorted({int(number) for number in numbers if number.isdigit()})

    def layer(self, layer: int) -> LayerWeights:
        """Reads, checks and dequantises one layer."""
        try:
            kind = self.config.kind(layer)
        except ValueError as error:
            raise ValueError(f"{self.folder}: {error}") from error
        tensors = {
            name: self._read(f"layers.{layer}.attn.{name}", wanted)
            for name, wanted in expected_tensors(self.config, kind).items()
        }
        return LayerWeights(self.config, layer, kind, tensors)

    def _read(self, name: str, wanted: Expected) -> Tensor:
        if wanted.dtype != "F8_E4M3":
            tensor = self._stored(name, wanted.dtype, wanted.shape)
            matrix = tensor.ndim == 2 and wanted.dtype == "BF16"
            return finite(name, tensor if matrix else tensor.float())
        codes = self._stored(name, wanted.dtype, wanted.shape)
        rows, columns = wanted.shape
        scale_name = name.removesuffix("weight") + "scale"
        scale = self._stored(scale_name, "F8_E8M0", (-(-rows // BLOCK), -(-columns // BLOCK)))
        return finite(name, dequantise_blocks(codes, finite(scale_name, scale.float())))

    def _stored(self, name: str, dtype: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self._shards:
            raise ValueError(f"{self.folder} has no tensor {name}, which its config.json calls for")
        file = self.folder / self._shards[name]
        try:
            with safe_open(file, framework="pt") as stored:
                header = stored.get_slice(name)
                found, found_shape = header.get_dtype(), tuple(header.get_shape())
                if (found, found_shape) != (dtype, shape):
                    raise ValueError(f"{name} in {file.name} is {found} {list(found_shape)}, not {dtype} {list(shape)}")
                tensor: Tensor = stored.get_tensor(name)
                return tensor
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{name} cannot be read from {file}: {error}") from error


def dequantise_blocks(codes: Tensor, scale: Tensor) -> Tensor:
    """[N, K] bf16 from e4m3 codes [N, K] and block scales [ceil(N/128), ceil(K/128)] fp32: weight * scale, exact."""
    rows, columns = codes.shape
    spread = scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return (codes.float() * spread).to(torch.bfloat16)


def finite(name: str, tensor: Tensor) -> Tensor:
    """`tensor`, or a ValueError that names its first NaN or infinity."""
    bad = ~torch.isfinite(tensor)
    if bad.any():
        where = bad.nonzero()[0].tolist()
        raise ValueError(f"{name}{where} is {tensor[tuple(where)].item()}: {int(bad.sum())} values are not finite")
    return tensor
