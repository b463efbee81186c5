"""Hugging Face transformers as a path: an independent implementation of the same structure, in plain torch.

A second opinion on structure, not on rounding. It has no Hadamard transform and no quantised cache;
`difftest/ledger.py` lists every known difference and measures it.
"""

from importlib.metadata import PackageNotFoundError, version
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..reference.inputs import LayerInputs
from ..trace import StageTensors, Trace
from . import _sglang_math as math_
from . import _transformers_modules as hf
from ._transformers_attention import HfAttention
from .base import Availability, Declaration, Path, Rounding

INSTALL = 'pip install "difftest[transformers]"'
OLDEST = (5, 24)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SCORE_ROWS = 32
"""Rows scored at a time: the module holds every product of every head."""

FP32 = Declaration()
BF16 = Declaration(
    key=Rounding(pooled="bf16", normed="bf16", rotated="bf16"),
    query=Rounding(rotated="bf16"),
    window=Rounding(normed="bf16"),
    latent=Rounding(pooled="bf16", normed="bf16"),
    rope_tail=Rounding(normed="bf16", rotated="bf16"),
    attn_query=Rounding(normed="bf16", rotated="bf16"),
    pool="bf16",
    attention="bf16",
    probability="bf16",
    output="bf16",
)


class Transformers(HfAttention, Path):
    """Hugging Face's compressor, indexer and attention modules on inputs that start after the linear layers.

    dtype     `fp32` (default) compares structure without rounding. `bf16` is what a model loaded in bf16 computes, for
              the ledger: some of its roundings (bf16 RoPE table, logits) cannot be declared, so checks report them.
    hadamard  `added` (default): applied to keys and queries here, because the modules leave it out on both sides and
              the canonical tensors have it. `absent`: the tensors as the modules make them.
    """

    name = "transformers"
    says: ClassVar[str] = "Hugging Face's modules: a second opinion on structure"

    def __init__(self, dtype: str = "fp32", hadamard: str = "added") -> None:
        if dtype not in DTYPES:
            raise ValueError(f"dtype is {dtype!r}: choose {' or '.join(DTYPES)}")
        if hadamard not in ("added", "absent"):
            raise ValueError(f"hadamard is {hadamard!r}: choose added or absent")
        self.dtype = DTYPES[dtype]
        self.adds_hadamard = hadamard == "added"
        self.declares = FP32 if dtype == "fp32" else BF16

    def availability(self) -> Availability:
        try:
            found = version("transformers")
        except PackageNotFoundError:
            return Availability(False, "transformers is not installed", INSTALL)
        if tuple(int(part) for part in found.split(".")[:2]) < OLDEST:
            return Availability(False, f"transformers {found} is older than 5.24, the first one adapted", INSTALL)
        return Availability(True)

    # compressed, index_k, index_q, head_weight ------------------------------------------------------------------------

    def _indexer(self, inputs: LayerInputs) -> tuple[Any, Any]:
        """A fresh attention module and its indexer, whose query is one row of zeros until it is given."""
        assert inputs.index is not None
        module, config = self.module(inputs), inputs.config
        indexer = module.compressor.indexer
        self.load(indexer, inputs.index, inputs.ratio)
        zeros = torch.zeros((1, 1, config.index_n_heads * config.index_head_dim), dtype=self.dtype)
        indexer.q_b_proj = hf.Given(zeros.to(inputs.row_position.device))
        indexer.scorer.weights_proj = hf.Given(indexer.q_b_proj.value[..., : config.index_n_heads])
        return module, indexer

    def _call_indexer(self, indexer: Any, rows: Tensor, positions: Tensor, cache: Any, layer: int) -> Tensor:
        """Calls the indexer with rows of `kv_score` as its linear outputs; the selection int64 [1, n, k]."""
        self.project(indexer, rows)
        hidden = self.hidden(positions)
        chosen: Tensor = indexer(hidden, hidden, positions.unsqueeze(0), cache, layer)
        return chosen

    def _transformed(self, x: Tensor) -> Tensor:
        return math_.hadamard(x) if self.adds_hadamard else x

    @torch.no_grad()
    def compressed(self, inputs: LayerInputs, trace: Trace) -> StageTensors:
        """What the indexer's norm is called with, step after step."""
        assert inputs.index is not None
        module, indexer = self._indexer(inputs)
        with hf.captured(indexer.kv_norm) as calls:
            for chunks in self.chunks(inputs, inputs.index):
                cache = self.cache(module)
                for rows in chunks:
                    self._call_indexer(indexer, rows, inputs.row_position[:1], cache, module.layer_idx)
        none = torch.empty((0, inputs.config.index_head_dim), device=inputs.row_position.device)
        return {"value": torch.cat([none, *(call[0].float() for call in calls)])}

    @torch.no_grad()
    def index_k(self, inputs: LayerInputs, trace: Trace) -> StageTensors:
        """Each pooled entry is fed alone in a block whose other gates are -inf: pooling returns it unchanged."""
        module, indexer = self._indexer(inputs)
        hf.set_parameter(indexer, "position_bias", torch.zeros_like(indexer.position_bias))
        keys, pooled = [], trace.value("compressed")
        for first, last in zip(inputs.entry_offset[:-1], inputs.entry_offset[1:], strict=True):
            cache, rows = self.cache(module), _alone(pooled[first:last], inputs.ratio)
            self._call_indexer(indexer, rows, inputs.row_position[:1], cache, module.layer_idx)
            keys.append(cache.layers[module.layer_idx].compressed_kv["indexer"][0].float())
        return {"value": self._transformed(torch.cat(keys))}

    @torch.no_grad()
    def index_q(self, inputs: LayerInputs, trace: Trace) -> StageTensors:
        """The query that the indexer hands to its scorer."""
        assert inputs.index_query is not None and inputs.index is not None
        _, indexer = self._indexer(inputs)
        indexer.q_b_proj = hf.Given(inputs.index_query.to(self.dtype).flatten(1).unsqueeze(0))
        with hf.captured(indexer.scorer) as calls:
            self._call_indexer(indexer, inputs.index.kv_score[:0], inputs.row_position, None, 0)
        return {"value": self._transformed(calls[0][0].float())}

    @torch.no_grad()
    def head_weight(self, inputs: LayerInputs, trace: Trace) -> StageTensors:
        """What the scorer multiplies a head by: its score where that head's product is 1 and the others are 0."""
        assert inputs.index_weight is not None
        scorer, heads = self._indexer(inputs)[1].scorer, inputs.config.index_n_heads
        scorer.weights_proj = hf.Given(inputs.index_weight.to(self.dtype).unsqueeze(0))
        one_head = torch.eye(heads, device=inputs.row_position.device)[:, None, :, None]
        query = one_head.expand(-1, len(inputs.index_weight), -1, -1)
        return {"value": scorer(query, query.new_ones((heads, 1, 1)), query)[..., 0].T.contiguous()}

    # score and topk ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def score(self, inputs: LayerInputs, trace: Trace) -> StageTensors:
        visible, scorer = inputs.visible, self._indexer(inputs)[1].scorer
        weight = trace.value("head_weight") / (scorer.softmax_scale * scorer.weights_scaling)
        out = torch.full((len(visible), int(visible.max())), -torch.inf, device=visible.device)
        for rows, offset, seen in self.rows_of(inputs):
            key = trace.value("index_k")[offset : offset + seen].unsqueeze(0)
            for start in range(0, len(rows), SCORE_ROWS):
                part = rows[start : start + SCORE_ROWS]
                scorer.weights_proj = hf.Given(weight[part].unsqueeze(0))
                out[part, :seen] = scorer(trace.value("index_q")[part].unsqueeze(0), key, key)[0]
        entry = torch.arange(out.shape[1], device=out.device)
        return {"value": out.masked_fill(entry >= visible.unsqueeze(1), -torch.inf)}

    @torch.no_grad()
    def topk(self, inputs: LayerInputs, trace: Trace) -> StageTensors:
        """The indexer's own mask and selection on the given scores; columns it does not return are -1."""
        assert inputs.index is not None
        module, indexer = self._indexer(inputs)
        score, width = trace.value("score"), inputs.config.index_n_heads * inputs.config.index_head_dim
        out = torch.full((len(score), inputs.config.index_topk), -1, dtype=torch.int32, device=score.device)
        for rows, _, seen in self.rows_of(inputs):
            cache = self.cache(module)
            entries = torch.zeros((1, seen, inputs.config.index_head_dim), dtype=self.dtype, device=score.device)
            cache.layers[module.layer_idx].compressed_kv["indexer"] = entries
            indexer.q_b_proj = hf.Given(entries.new_zeros((1, len(rows), width)))
            indexer.scorer = hf.Given(score[rows, :seen].unsqueeze(0))
            none = inputs.index.kv_score[:0]
            chosen = self._call_indexer(indexer, none, inputs.row_position[rows], cache, module.layer_idx)[0]
            out[rows, : chosen.shape[1]] = chosen.to(torch.int32)
        return {"value": out}


def _alone(pooled: Tensor, ratio: int) -> Tensor:
    """Rows of `kv_score` whose pooled entries are exactly `pooled` [E, D]: fp32 [E ratio, 4 D].

    The first own slot of every block holds the entry with gate 0; all other slots hold 0 with gate -inf.
    """
    entries, dim = pooled.shape
    rows = pooled.new_zeros((entries, ratio, 4, dim))
    rows[:, :, 2:] = -torch.inf
    rows[:, 0, 1], rows[:, 0, 3] = pooled, 0.0
    return rows.view(entries * ratio, 4 * dim)
