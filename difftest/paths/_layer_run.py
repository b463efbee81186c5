"""One layer through SGLang's `DeepseekV4AttnBackend`, step by step as its model drives it, and what came out of it.

The projections before and after the layer are the case's tensors; tokens that the case does not compare carry its rows'
tensors in turn, so that every token of a step is scored and attended as in service.
"""

import math
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..reference.inputs import CompressorInputs, LayerInputs, Step
from ..stages import StageName
from ..trace import StageTensors
from ._layer_backend import LAYER, Backend, stand_up
from ._layer_graph import DecodeGraph
from ._layer_keys import Keys, index_pages
from ._layer_taps import Modules, Seen, taps
from ._live_compressor import SYSTEM_PAGE, LiveCompressor, Which, calls_of, compressor_inputs, is_decode
from .flashmla_layout import dequantise, flashmla_pages, unpack


@dataclass
class StepTokens:
    """The tokens of one step [T], and the case's rows among them: `rows` [r] row numbers at `tokens` [r]."""

    step: Step
    request: Tensor
    position: Tensor
    rows: Tensor
    tokens: Tensor

    @classmethod
    def of(cls, inputs: LayerInputs, step: Step) -> "StepTokens":
        device = inputs.row_position.device
        request = torch.cat([torch.full((span.stop - span.start,), span.request) for span in step]).to(device)
        position = torch.cat([torch.arange(span.start, span.stop) for span in step]).to(device)
        width = max(inputs.lengths)
        key, row_key = request * width + position, inputs.row_request * width + inputs.row_position
        order = key.argsort()
        place = torch.searchsorted(key[order], row_key).clamp_max(len(key) - 1)
        found = key[order][place] == row_key
        return cls(step, request, position, found.nonzero().squeeze(1), order[place][found])

    def spread(self, per_row: Tensor) -> Tensor:
        """[T, ...]: each row's own tensor at its token, the others' in turn."""
        spread = per_row[torch.arange(len(self.position), device=per_row.device) % len(per_row)]
        spread[self.tokens] = per_row[self.rows]
        return spread.contiguous()


@dataclass
class LayerRun:
    """Drives the backend over all steps and gathers the stage tensors of the case's rows and entries."""

    inputs: LayerInputs
    table: Tensor
    keys: Keys
    stood: Backend
    out: dict[str, Tensor] = field(default_factory=dict)
    routes: set[str] = field(default_factory=set)
    graphs: bool = False
    graph: DecodeGraph | None = None

    @classmethod
    def start(cls, inputs: LayerInputs, table: Tensor, topk: str, keys: Keys, graphs: bool = False) -> "LayerRun":
        run = cls(inputs, table, keys, stand_up(inputs, topk), graphs=graphs)
        rows, device, config = len(inputs.row_position), inputs.row_position.device, inputs.config
        run.out["output"] = torch.full((rows, config.num_attention_heads, config.head_dim), math.nan, device=device)
        run.out["lse"] = torch.full((rows, config.num_attention_heads), math.nan, device=device)
        if inputs.kind == "csa":
            index = compressor_inputs(inputs, "index")
            heads = (rows, config.index_n_heads)
            run.out["pooled"] = torch.full((inputs.entry_offset[-1], config.index_head_dim), math.nan, device=device)
            run.out["pooled"][run.compressor.prefix_entries()] = index.pooled_prefix
            run.out["query"] = torch.zeros(*heads, config.index_head_dim, dtype=keys.query_dtype, device=device)
            run.out["folded"] = torch.full(heads, math.nan, device=device)
            run.out["slots"] = torch.full((rows, config.index_topk), -2, dtype=torch.int32, device=device)
            width = int(inputs.visible.max()) if rows else 0
            run.out["score"] = torch.full((rows, width), math.nan, device=device)
        return run

    @property
    def compressor(self) -> LiveCompressor:
        """Plans over the backend's own locations; its state pages follow the backend's window pages."""
        compressor = LiveCompressor(self.inputs)
        compressor.full_to_state = self.stood.full_to_swa
        return compressor

    def run(self) -> None:
        """Pooled prefixes first, as a prefix hit leaves them, then every step."""
        from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

        with torch.no_grad(), forward_context(ForwardContext(attn_backend=self.stood.backend)):
            if any(self.inputs.prefix_entries):
                self._restore_prefix()
            for step in calls_of(self.inputs.steps):
                self._step(StepTokens.of(self.inputs, step))

    # prefix -------------------------------------------------------------------------------------------------------

    def _restore_prefix(self) -> None:
        from sglang.kernels.ops.attention.dsv4 import compress_forward

        pool, compressor, ratio = self.stood.pool, self.compressor, self.inputs.ratio
        states: list[tuple[Which, Any, Tensor, int]] = [
            ("main", pool.get_attention_compress_states(LAYER), pool.get_extra_key_buffer(LAYER), SYSTEM_PAGE // ratio)
        ]
        if self.inputs.kind == "csa":
            buffer = pool.get_index_k_with_scale_buffer(LAYER)
            states.append(("index", pool.get_indexer_compress_states(LAYER), buffer, self.inputs.page_size))
        for which, state, buffer, page_size in states:
            part = compressor_inputs(self.inputs, which)
            width = part.norm_weight.shape[0]
            pooled = torch.zeros(self.inputs.entry_offset[-1], width, device=self.table.device)
            pooled[compressor.prefix_entries()] = part.pooled_prefix
            step = (compressor.prefix_step(),)
            compressor.store_steps(step, which, pooled, self.table, buffer.view(torch.uint8), page_size)
            if history := compressor.history_step():
                call = compressor.call(history)
                ring = state.kv_score_buffer.kv_score.view(-1, ratio, part.kv_score.shape[1])
                compress_forward(
                    ring, part.kv_score[call.tokens], part.ape, call.plan, head_dim=width, compress_ratio=ratio
                )
        first = torch.tensor([entries * ratio for entries in self.inputs.prefix_entries], device=self.table.device)
        old = (self.inputs.window_position < first[self.inputs.window_request]).nonzero().squeeze(1)
        if len(old):
            self._store_window(self._window_slots()[old], self.inputs.window_kv[old], self.inputs.window_position[old])

    def _window_slots(self) -> Tensor:
        """[W] int64 slot of each window token in the window pool."""
        location = self.stood.req_to_token[self.inputs.window_request, self.inputs.window_position]
        return self.stood.full_to_swa[location.long()]

    def _store_window(self, slots: Tensor, latents: Tensor, positions: Tensor) -> None:
        self.stood.pool.set_swa_key_buffer_radix_fused_norm_rope(
            layer_id=LAYER,
            swa_loc=slots.to(torch.int32),
            kv=latents.contiguous(),
            kv_weight=self.inputs.kv_norm_weight.to(torch.bfloat16),
            eps=self.inputs.config.rms_norm_eps,
            freqs_cis=self.table,
            positions=positions,
        )

    # one step -----------------------------------------------------------------------------------------------------

    def _step(self, tokens: StepTokens) -> None:
        from sglang.kernels.ops.attention.dsv4 import fused_q_norm_rope

        inputs, backend = self.inputs, self.stood.backend
        batch = self._batch(tokens)
        backend.init_forward_metadata(batch)
        self._store_window(backend.get_swa_out_cache_loc(batch), self._latents(tokens), tokens.position)
        seen = Seen()
        with taps(backend, seen):
            indexed = self._index(tokens, batch, seen)
            query = tokens.spread(inputs.attn_query)
            rotated = torch.empty_like(query)
            fused_q_norm_rope(query, rotated, inputs.config.rms_norm_eps, self.table, tokens.position)
            output = backend.forward(
                q=rotated,
                k=rotated,
                v=rotated,
                layer=SimpleNamespace(layer_id=LAYER, v_head_dim=inputs.config.head_dim, tp_q_head_num=query.shape[1]),
                forward_batch=batch,
                compress_ratio=inputs.ratio,
                save_kv_cache=False,
                attn_sink=inputs.attn_sink.float(),
            )
        if self.graphs and self.graph is None and is_decode(tokens.step) and inputs.ratio:
            self.graph = DecodeGraph.capture(backend, batch, self._modules(tokens))
        self._record(tokens, indexed)
        for route, lse in seen.lse:
            self.routes.add(route)
            self.out["lse"][tokens.rows] = lse[tokens.tokens]
        self.out["output"][tokens.rows] = output.view(len(query), *query.shape[1:])[tokens.tokens].float()

    def prepare(self, step: Step) -> tuple[Any, Modules]:
        """The backend's batch and the layer's modules of a step, for whoever runs `Modules.run` itself (to time it)."""
        tokens = StepTokens.of(self.inputs, step)
        batch = self._batch(tokens)
        self.stood.backend.init_forward_metadata(batch)
        return batch, self._modules(tokens)

    def _index(self, tokens: StepTokens, batch: Any, seen: Seen) -> Seen:
        """Compressors and indexer of one step, or the replay of their graph; returns what they computed."""
        if not self.inputs.ratio:
            return seen
        modules = self._modules(tokens)
        if self.graph is not None and is_decode(tokens.step) and self.graph.fits(self.stood.backend, batch):
            self.routes.add("indexer: graph replay")
            return self.graph.replay(self.stood.backend, modules)
        modules.run(self.stood.backend, batch, seen)
        return seen

    def _record(self, tokens: StepTokens, seen: Seen) -> None:
        """Keeps the rows and entries of the case from what a step computed."""
        for rows, plan in seen.pooled:
            if rows.shape[1] == self.inputs.config.index_head_dim:
                entry = self.compressor.completed(plan, tokens.step, tokens.request)
                self.out["pooled"][entry[entry >= 0]] = rows[entry >= 0]
        if seen.query is not None and seen.folded is not None and seen.slots is not None:
            self.out["query"][tokens.rows] = seen.query.view(self.keys.query_dtype)[tokens.tokens]
            self.out["folded"][tokens.rows] = seen.folded.squeeze(-1)[tokens.tokens]
            self.out["slots"][tokens.rows] = seen.slots[tokens.tokens, : self.inputs.config.index_topk]
        first = 0
        for route, logits in seen.logits:  # in one call, or in chunks in order
            self.routes.add(route)
            inside = (tokens.tokens >= first) & (tokens.tokens < first + len(logits))
            width = min(logits.shape[1], self.out["score"].shape[1])
            self.out["score"][tokens.rows[inside], :width] = logits[tokens.tokens[inside] - first, :width]
            first += len(logits)

    def _modules(self, tokens: StepTokens) -> Modules:
        """What the backend reads of the layer's modules in this step."""
        inputs = self.inputs
        number = torch.arange(len(tokens.position), device=tokens.position.device).unsqueeze(1)
        main = None if inputs.main is None else self._compressor_module(inputs.main, tokens, index=False)
        return Modules(number, main, self._indexer_module(tokens) if inputs.kind == "csa" else None)

    def _latents(self, tokens: StepTokens) -> Tensor:
        """bf16 [T, C]: window latents of the tokens that have one, the others' in turn."""
        width, inputs = max(self.inputs.lengths), self.inputs
        key = tokens.request * width + tokens.position
        known = inputs.window_request * width + inputs.window_position
        place = torch.searchsorted(known, key).clamp_max(len(known) - 1)
        turn = torch.arange(len(key), device=key.device) % len(known)
        return inputs.window_kv[torch.where(known[place] == key, place, turn)]

    def _batch(self, tokens: StepTokens) -> Any:
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

        step, device = tokens.step, tokens.position.device
        stops = torch.tensor([span.stop for span in step], dtype=torch.int32)
        lengths = torch.tensor([span.stop - span.start for span in step], dtype=torch.int32)
        batch = ForwardBatch(
            forward_mode=ForwardMode.DECODE if is_decode(step) else ForwardMode.EXTEND,
            batch_size=len(step),
            input_ids=torch.zeros_like(tokens.position),
            req_pool_indices=torch.tensor([span.request for span in step], dtype=torch.int32, device=device),
            seq_lens=stops.to(device),
            seq_lens_cpu=stops,
            out_cache_loc=self.stood.req_to_token[tokens.request, tokens.position].long(),
            seq_lens_sum=int(stops.sum()),
            positions=tokens.position,
        )
        self.stood.runner.kv_index_translator.bind_own_plan(batch)
        if not is_decode(step):
            batch.extend_seq_lens = lengths.to(device)
            batch.extend_seq_lens_cpu = lengths.tolist()
            batch.extend_prefix_lens = (stops - lengths).to(device)
            batch.extend_prefix_lens_cpu = (stops - lengths).tolist()
            batch.extend_start_loc = (lengths.cumsum(0) - lengths).to(torch.int32).to(device)
            batch.extend_num_tokens = int(lengths.sum())
        return batch

    def _compressor_module(self, part: CompressorInputs, tokens: StepTokens, index: bool) -> Any:
        """What the backend reads of SGLang's `Compressor` module; its GEMM yields the case's `kv_score`."""
        from sglang.srt.layers.attention.dsv4.compressor import Compressor

        first = torch.tensor([self.inputs.first_token(r) for r in range(len(self.inputs.lengths))])
        base = (torch.tensor(self.inputs.token_offset[:-1]) - first).to(tokens.position.device)
        kv_score = part.kv_score[base[tokens.request] + tokens.position].contiguous()
        module = SimpleNamespace(
            is_in_indexer=index,
            layer_id=LAYER,
            ratio=self.inputs.ratio,
            head_dim=part.norm_weight.shape[0],
            rotate=index,
            ape=part.ape.contiguous(),
            norm=SimpleNamespace(weight=part.norm_weight, variance_epsilon=self.inputs.config.rms_norm_eps),
            freqs_cis=self.table,
            compute_kv_score=lambda x, batch: kv_score[x.squeeze(1)],
            given=(kv_score,),
        )
        module.get_state_pool = lambda backend: Compressor.get_state_pool(module, backend)
        return module

    def _indexer_module(self, tokens: StepTokens) -> Any:
        """What the backend reads of SGLang's `C4Indexer` module, with the case's tensors behind its projections."""
        from sglang.srt.layers.attention.dsv4.indexer import C4Indexer

        inputs = self.inputs
        assert inputs.index is not None and inputs.index_query is not None and inputs.index_weight is not None
        query, weight = tokens.spread(inputs.index_query), tokens.spread(inputs.index_weight)
        module = SimpleNamespace(
            layer_id=LAYER,
            use_fp4_indexer=False,
            index_topk=inputs.config.index_topk,
            n_local_heads=inputs.config.index_n_heads,
            head_dim=inputs.config.index_head_dim,
            weight_scale=inputs.config.index_scale,
            freqs_cis=self.table,
            compressor=self._compressor_module(inputs.index, tokens, index=True),
            wq_b=lambda number: (query[number.squeeze(1)].flatten(1), None),
            compute_weights=lambda number, skip_scale: weight[number.squeeze(1)],
            given=(query, weight),
        )
        module.compute_q = lambda *given: C4Indexer.compute_q(module, *given)
        return module

    # results ------------------------------------------------------------------------------------------------------

    def stages(self) -> dict[StageName, StageTensors]:
        """Canonical tensors of every stage."""
        out: dict[StageName, StageTensors] = {}
        if self.inputs.kind == "csa":
            out = self._index_stages()
        out["kv"] = self._latent_stage()
        out["attention"] = {"value": self.out["output"], "lse": self.out["lse"]}
        return out

    def _index_stages(self) -> dict[StageName, StageTensors]:
        pages = index_pages(self.stood.pool)
        read = self.keys.stages(self.inputs, pages, self.out["query"], self.out["folded"])
        chosen = {"value": self._entries(), "slots": self.out["slots"]}
        return {
            "compressed": {"value": self.out["pooled"]},
            **read,
            "score": {"value": self._masked_score()},
            "topk": chosen,
        }

    def _masked_score(self) -> Tensor:
        score = self.out["score"]
        entry = torch.arange(score.shape[1], device=score.device)
        return score.masked_fill(entry >= self.inputs.visible.unsqueeze(1), -math.inf)

    def _entries(self) -> Tensor:
        """int32 [R, k] request-relative entries of the selected slots, -1 kept; -2 for a slot of a foreign page."""
        inputs, slots = self.inputs, self.out["slots"].long()
        number = torch.full((len(inputs.lengths), inputs.num_pages + len(inputs.lengths)), -1, device=slots.device)
        for request, pages in enumerate(inputs.page_table):
            owned = pages[pages >= 0]
            number[request, owned] = torch.arange(len(owned), device=slots.device)
        page = number[inputs.row_request.unsqueeze(1), slots.clamp_min(0) // inputs.page_size]
        entry = torch.where(page < 0, -2, page * inputs.page_size + slots % inputs.page_size)
        return torch.where(slots == -1, -1, entry).to(torch.int32)

    def _latent_stage(self) -> StageTensors:
        pool, inputs = self.stood.pool, self.inputs
        window = unpack(flashmla_pages(SYSTEM_PAGE), pool.get_swa_raw_buffer(LAYER), self._window_slots())
        if not inputs.ratio:
            empty = torch.empty(0, inputs.config.head_dim, device=inputs.window_kv.device)
            return {"window": dequantise(*window), "compressed": empty}
        buffer = pool.get_extra_key_buffer(LAYER).view(torch.uint8)
        compressed = unpack(flashmla_pages(SYSTEM_PAGE // inputs.ratio), buffer, inputs.entry_slot)
        return {"window": dequantise(*window), "compressed": dequantise(*compressed)}
