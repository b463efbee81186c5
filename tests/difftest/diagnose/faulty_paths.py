"""Paths with one fault each, by overriding one building block; installed for tests by the `faulty` fixture."""

from dataclasses import replace

import torch

from difftest.paths.bf16_k import Bf16K
from difftest.paths.sglang_fp8_model import SglangFp8Model
from difftest.trace import Trace


class NoHadamard(SglangFp8Model):
    def prepare_key(self, inputs, pooled, weight, positions):
        normed = self.norm(pooled, weight, inputs.config.rms_norm_eps)
        return self.rotate(normed, self.rope_table(inputs, positions))


class EntryAsPosition(SglangFp8Model):
    def prepare_key(self, inputs, pooled, weight, positions):
        return super().prepare_key(inputs, pooled, weight, positions // inputs.ratio)


class BiasPhase(SglangFp8Model):
    def pool_layer(self, inputs, read):
        return super().pool_layer(inputs, replace(read, ape=read.ape.roll(1, 0)))


class NoRelu(SglangFp8Model):
    def activate(self, product):
        return product


class RoundedScore(SglangFp8Model):
    def scale_score(self, total, scale):
        return super().scale_score(total, scale).bfloat16().float()


class LosesLast(SglangFp8Model):
    """Takes the best entry that it should leave out for the last one it should select."""

    def select(self, score, k):
        chosen = super().select(score, k)
        if len(score) > k:
            left = [entry for entry in range(len(score)) if entry not in set(chosen.tolist())]
            chosen[score[chosen].argmin()] = max(left, key=lambda entry: float(score[entry]))
        return chosen


class PageEdge(SglangFp8Model):
    def unpack_page(self, layout, pool, slots):
        codes, scale = super().unpack_page(layout, pool, slots)
        return codes, torch.where(slots[:, None] % 64 == 63, 2 * scale, scale)


class NoSink(SglangFp8Model):
    def attention(self, inputs, trace):
        return super().attention(replace(inputs, attn_sink=torch.full_like(inputs.attn_sink, -1e30)), trace)


class SecondRequestCrashes(SglangFp8Model):
    def score(self, inputs, trace):
        if bool((inputs.row_request > 0).any()):
            raise RuntimeError(f"illegal access of request {int(inputs.row_request.max())}")
        return super().score(inputs, trace)


class FullWidthOnly(NoRelu):
    """Refuses what the kernel of a model refuses: other dims than its own."""

    def index_k(self, inputs, trace):
        if inputs.config.index_head_dim != 128:
            raise ValueError("this kernel takes 128 dims")
        return super().index_k(inputs, trace)


class Flaky(SglangFp8Model):
    """Fails every third time."""

    runs = 0

    def score(self, inputs, trace):
        Flaky.runs += 1
        stored = super().score(inputs, trace)
        return {"value": 2 * stored["value"]} if Flaky.runs % 3 == 0 else stored


class NeighboursKey(Bf16K):
    def score(self, inputs, trace):
        key = {"value": trace["index_k"]["value"].roll(1, 0)}
        return super().score(inputs, Trace(trace.case, trace.layer, trace.path, {**trace.stages, "index_k": key}))
