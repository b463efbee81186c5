"""A DeepSeek-V4 checkpoint of four small layers with random weights: every layer kind, published attention shapes."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

RATIOS = (0, 4, 128, 4, 0)
"""Window only, indexer, heavy compression, indexer; the last is the (absent) next-token layer."""

CONFIG = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "vocab_size": 2048,
    "hidden_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_nope_head_dim": 448,
    "qk_rope_head_dim": 64,
    "v_head_dim": 512,
    "q_lora_rank": 512,
    "o_lora_rank": 256,
    "o_groups": 8,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "sliding_window": 128,
    "window_size": 128,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn",
        "rope_type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-6,
    "compress_ratios": list(RATIOS),
    "num_hash_layers": 0,
    "n_hash_layers": 0,
    "num_nextn_predict_layers": 0,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "scoring_func": "sqrtsoftplus",
    "routed_scaling_factor": 1.5,
    "moe_intermediate_size": 256,
    "intermediate_size": 256,
    "hidden_act": "silu",
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "tie_word_embeddings": False,
}


Shape = tuple[int, ...]


def shapes() -> Iterator[tuple[str, Shape, torch.dtype]]:
    """Name, shape and dtype of every tensor, as published checkpoints name them."""
    bf16, fp32, c = torch.bfloat16, torch.float32, CONFIG
    hidden, streams = c["hidden_size"], c["hc_mult"]
    mixes = streams * (2 + streams)
    yield from (("embed.weight", (c["vocab_size"], hidden), bf16), ("head.weight", (c["vocab_size"], hidden), bf16))
    yield "norm.weight", (hidden,), bf16
    for name, shape in (("fn", (streams, streams * hidden)), ("base", (streams,)), ("scale", (1,))):
        yield f"hc_head_{name}", shape, fp32
    for layer in range(c["num_hidden_layers"]):
        at = f"layers.{layer}."
        yield from ((f"{at}attn_norm.weight", (hidden,), bf16), (f"{at}ffn_norm.weight", (hidden,), bf16))
        for part in ("attn", "ffn"):
            for name, shape in (("fn", (mixes, streams * hidden)), ("base", (mixes,)), ("scale", (3,))):
                yield f"{at}hc_{part}_{name}", shape, fp32
        yield from ((at + name, shape, dtype) for name, shape, dtype in _attention(RATIOS[layer]))
        yield from ((at + name, shape, dtype) for name, shape, dtype in _experts())


def _attention(ratio: int) -> Iterator[tuple[str, Shape, torch.dtype]]:
    bf16, c = torch.bfloat16, CONFIG
    hidden, heads, width, rank = c["hidden_size"], c["num_attention_heads"], c["head_dim"], c["q_lora_rank"]
    groups, out_rank = c["o_groups"], c["o_lora_rank"]
    yield "attn.wq_a.weight", (rank, hidden), bf16
    yield "attn.q_norm.weight", (rank,), bf16
    yield "attn.wq_b.weight", (heads * width, rank), bf16
    yield "attn.wkv.weight", (width, hidden), bf16
    yield "attn.kv_norm.weight", (width,), bf16
    yield "attn.attn_sink", (heads,), torch.float32
    yield "attn.wo_a.weight", (groups * out_rank, heads * width // groups), bf16
    yield "attn.wo_b.weight", (hidden, groups * out_rank), bf16
    if ratio:
        yield from _compressor("attn.compressor.", ratio, width)
    if ratio == 4:
        index_heads, dim = c["index_n_heads"], c["index_head_dim"]
        yield "attn.indexer.wq_b.weight", (index_heads * dim, rank), bf16
        yield "attn.indexer.weights_proj.weight", (index_heads, hidden), bf16
        yield from _compressor("attn.indexer.compressor.", ratio, dim)


def _compressor(at: str, ratio: int, dim: int) -> Iterator[tuple[str, Shape, torch.dtype]]:
    halves = 2 if ratio == 4 else 1
    yield f"{at}ape", (ratio, halves * dim), torch.float32
    yield f"{at}norm.weight", (dim,), torch.bfloat16
    for name in ("wkv", "wgate"):
        yield f"{at}{name}.weight", (halves * dim, CONFIG["hidden_size"]), torch.bfloat16


def _experts() -> Iterator[tuple[str, Shape, torch.dtype]]:
    bf16, hidden, inner = torch.bfloat16, CONFIG["hidden_size"], CONFIG["moe_intermediate_size"]
    yield "ffn.gate.weight", (CONFIG["n_routed_experts"], hidden), bf16
    yield "ffn.gate.bias", (CONFIG["n_routed_experts"],), torch.float32
    experts = [f"experts.{number}" for number in range(CONFIG["n_routed_experts"])]
    for expert in [*experts, "shared_experts"]:
        for name, shape in (("w1", (inner, hidden)), ("w3", (inner, hidden)), ("w2", (hidden, inner))):
            yield f"ffn.{expert}.{name}.weight", shape, bf16


def weights(seed: int = 1) -> Iterator[tuple[str, Tensor]]:
    """Random weights: norms near one, matrices of unit gain, biases and gates small."""
    generator = torch.Generator().manual_seed(seed)
    for name, shape, dtype in shapes():
        drawn = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            drawn = 1 + 0.1 * drawn
        elif len(shape) == 2 and not name.endswith("ape"):
            drawn *= shape[1] ** -0.5
        else:
            drawn *= 0.3
        yield name, drawn.to(dtype)


def write(folder: Path) -> None:
    """Writes the checkpoint, `config.json` and `model.safetensors`, into `folder`; about 330 MB."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=1) + "\n")
    save_file(dict(weights()), folder / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    write(Path(sys.argv[1]))
