"""Writes a small checkpoint in exactly the published form: names, dtypes, shapes, shards, index, block scales."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

CONFIG: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "hidden_size": 256,
    "num_hidden_layers": 5,
    "num_attention_heads": 2,
    "head_dim": 128,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 192,
    "index_n_heads": 4,
    "index_head_dim": 128,
    "index_topk": 8,
    "sliding_window": 16,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "max_position_embeddings": 1048576,
    "rms_norm_eps": 1e-6,
    "compress_ratios": [0, 0, 4, 128, 4, 0],
}


def blocks(generator: torch.Generator, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """e4m3 codes [rows, columns] and one ue8m0 scale a 128 x 128 block, every block another power of two."""
    codes = (torch.randn(rows, columns, generator=generator) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    shape = (-(-rows // 128), -(-columns // 128))
    exponent = torch.randint(-12, -8, shape, generator=generator).float()
    return codes, torch.exp2(exponent).to(torch.float8_e8m0fnu)


def layer_tensors(layer: int, kind: str) -> dict[str, Tensor]:
    """Every tensor of a layer's attention, those that are not read included, and one expert."""
    made = torch.Generator().manual_seed(layer)
    hidden, rank, width, heads = 256, 192, 128, 2
    found: dict[str, Tensor] = {}

    def fp8(name: str, rows: int, columns: int) -> None:
        found[f"{name}.weight"], found[f"{name}.scale"] = blocks(made, rows, columns)

    def bf16(name: str, *shape: int) -> None:
        spread = 1.0 if len(shape) == 1 else hidden**-0.5
        found[f"{name}.weight"] = (
            1.0 * (len(shape) == 1) + spread * 0.5 * torch.randn(shape, generator=made)
        ).bfloat16()

    def compressor(prefix: str, dim: int, ratio: int) -> None:
        rows = 2 * dim if ratio == 4 else dim
        found[f"{prefix}.ape"] = torch.randn(ratio, rows, generator=made)
        bf16(f"{prefix}.norm", dim)
        bf16(f"{prefix}.wkv", rows, hidden)
        bf16(f"{prefix}.wgate", rows, hidden)

    fp8("attn.wq_a", rank, hidden)
    fp8("attn.wq_b", heads * width, rank)
    fp8("attn.wkv", width, hidden)
    fp8("attn.wo_b", hidden, 256)
    bf16("attn.q_norm", rank)
    bf16("attn.kv_norm", width)
    found["attn.attn_sink"] = torch.randn(heads, generator=made)
    if kind != "swa":
        compressor("attn.compressor", width, 4 if kind == "csa" else 128)
    if kind == "csa":
        fp8("attn.indexer.wq_b", 4 * 128, rank)
        bf16("attn.indexer.weights_proj", 4, hidden)
        compressor("attn.indexer.compressor", 128, 4)
    found["ffn.experts.0.w1.weight"] = torch.zeros(4, 4, dtype=torch.int8)
    return {f"layers.{layer}.{name}": tensor for name, tensor in found.items()}


def write_checkpoint(folder: Path) -> dict[str, Tensor]:
    """Writes config.json, two shards and the index; returns all tensors. The experts' shard is no safetensors file."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    tensors: dict[str, Tensor] = {}
    for layer, kind in ((1, "swa"), (2, "csa"), (3, "hca"), (4, "csa")):
        tensors |= layer_tensors(layer, kind)
    shards: dict[str, dict[str, Tensor]] = {}
    for number, (name, tensor) in enumerate(tensors.items()):
        shard = f"model-0000{1 + number % 2}-of-00003.safetensors"
        shards.setdefault("model-00003-of-00003.safetensors" if "experts" in name else shard, {})[name] = tensor
    weight_map = {name: shard for shard, part in shards.items() for name in part}
    for shard, part in shards.items():
        if shard.startswith("model-00003"):
            (folder / shard).write_bytes(b"never opened")
        else:
            save_file(part, folder / shard, metadata={"format": "pt"})
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return tensors
