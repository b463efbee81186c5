"""The file a captured layer is written to: one safetensors file, schema `difftest.capture/1`.

Tensor names are the fields of `LayerInputs`; metadata holds the case, the model's constants and the steps as JSON. The
folder also holds the constants as a `config.json`.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SCHEMA = "difftest.capture/1"
CONFIG_FILE = "config.json"
PAGE_ENTRIES = 64
CONSTANTS = (
    "hidden_size",
    "num_hidden_layers",
    "head_dim",
    "qk_rope_head_dim",
    "q_lora_rank",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "sliding_window",
    "rope_theta",
    "compress_rope_theta",
    "max_position_embeddings",
    "rms_norm_eps",
)
ROPE = {
    "rope_factor": "factor",
    "rope_original_max_position": "original_max_position_embeddings",
    "rope_beta_fast": "beta_fast",
    "rope_beta_slow": "beta_slow",
}


@dataclass(frozen=True)
class Layer:
    """One captured layer, on the CPU.

    name     names the file and the case.       layer    its number.      config  constants (`constants`).
    lengths  tokens of each request, all of which arrived in the captured step.
    tensors  named as in `LayerInputs`; `page_table` still holds the server's page numbers.
    """

    name: str
    layer: int
    config: dict[str, Any]
    lengths: tuple[int, ...]
    tensors: dict[str, Tensor]
    origin: str = ""


def constants(model: Any, heads: int) -> dict[str, Any]:
    """The model's constants from its Hugging Face config; `heads` attention heads are on this rank.

    From transformers 5 on, the rotary constants, `rope_theta` among them, are in `rope_parameters`.
    """
    parameters = dict(getattr(model, "rope_parameters", None) or {})
    scaling = parameters | dict(getattr(model, "rope_scaling", None) or {})
    found: dict[str, Any] = {
        name: getattr(model, name) if hasattr(model, name) else parameters[name] for name in CONSTANTS
    }
    found |= {name: scaling[key] for name, key in ROPE.items()}
    return found | {"num_attention_heads": heads, "compress_ratios": list(model.compress_ratios)}


def write(layer: Layer, folder: Path) -> Path:
    """Writes the file and returns its path; a half-written one never replaces a whole one."""
    from safetensors.torch import save_file

    tensors = {**layer.tensors, **_pages(layer)}
    pages = int(tensors["page_table"].max()) + 1 if tensors["page_table"].numel() else 0
    facts = {
        "schema": SCHEMA,
        "case": json.dumps(_case(layer)),
        "origin": layer.origin,
        "config": json.dumps(layer.config),
        "layer": str(layer.layer),
        "lengths": json.dumps(layer.lengths),
        "prefix_entries": json.dumps([0] * len(layer.lengths)),
        "steps": json.dumps([[{"request": n, "start": 0, "stop": stop} for n, stop in enumerate(layer.lengths)]]),
        "num_pages": str(pages),
        "page_size": str(PAGE_ENTRIES),
    }
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{layer.name}.safetensors"
    part = file.with_suffix(".part")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, part, metadata=facts)
    part.replace(file)
    (folder / CONFIG_FILE).write_text(json.dumps(_config_file(layer.config), indent=1) + "\n")
    return file


def _case(layer: Layer) -> dict[str, Any]:
    rows = len(layer.tensors["row_request"])
    says = "captured inputs; not generated from a recipe"
    return {
        "id": f"capture:{layer.name}",
        "family": "gaussian",
        "lengths": layer.lengths,
        "rows": rows,
        "layers": [layer.layer],
        "model": CONFIG_FILE,
        "profiles": [],
        "says": says,
    }


def _config_file(config: dict[str, Any]) -> dict[str, Any]:
    plain = {name: value for name, value in config.items() if name not in ROPE}
    return {**plain, "rope_scaling": {key: config[name] for name, key in ROPE.items()}}


def _pages(layer: Layer) -> dict[str, Tensor]:
    """The page table with the server's page numbers replaced by their ranks: same order, no huge pool to replay in."""
    table = layer.tensors["page_table"]
    owned = torch.arange(table.shape[1])[None, :] * PAGE_ENTRIES < torch.tensor(layer.lengths)[:, None] // 4
    rank = torch.full_like(table, -1)
    rank[owned] = torch.searchsorted(table[owned].unique(), table[owned]) + 1
    return {"page_table": rank}
