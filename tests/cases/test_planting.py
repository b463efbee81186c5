"""Planted keys, latents and queries arrive where they were aimed, and nothing else moves."""

import pytest
import torch
from difftest.cases.planting import (
    plant_pooled,
    pooled_for_key,
    pooled_for_latent,
    query_for,
    row_scores,
    sampled_keys,
    scorer_queries,
)
from difftest.reference import oracle
from difftest.reference.compressor import pool_layer
from difftest.reference.indexer import score
from torch import Tensor
from torch.nn.functional import cosine_similarity

from .conftest import layer_of

PREFIX = {"mode": "decode", "decode_tokens": 9, "pooled_prefix": 20}
FP32 = 1e-6
"""Pooling eight equal fp32 values through a softmax keeps them to a few fp32 roundings; directions likewise."""


@pytest.mark.parametrize("fields", [{}, PREFIX], ids=["tokens", "prefix"])
def test_planted_entries_pool_to_the_value_and_no_other_entry_changes(fields: dict[str, object]) -> None:
    before = pool_layer(layer_of("gaussian", (90, 41), **fields), "index")
    inputs = layer_of("gaussian", (90, 41), **fields)
    entry = torch.tensor([0, 7, 20, 21])
    value = torch.arange(4 * 128.0).view(4, 128) - 200
    plant_pooled(inputs, "index", 0, entry, value)
    after = pool_layer(inputs, "index")
    assert torch.allclose(after[entry], value.double(), rtol=FP32, atol=0)
    rest = torch.ones(len(after), dtype=torch.bool)
    rest[entry] = False
    assert torch.equal(after[rest], before[rest])


def test_planted_entries_of_ratio_128() -> None:
    inputs = layer_of("gaussian", (300, 400), kind="hca")
    value = torch.ones(1, 512) * 3
    plant_pooled(inputs, "main", 1, torch.tensor([2]), value)
    assert torch.allclose(pool_layer(inputs, "main")[2 + 2], value.double()[0], rtol=FP32, atol=0)


def test_keys_queries_and_latents_point_as_asked() -> None:
    inputs = layer_of("gaussian", (90, 41))
    entry = torch.tensor([3, 11])
    wanted, latent = torch.randn(2, 128, dtype=torch.float64), torch.randn(2, 512, dtype=torch.float64)
    plant_pooled(inputs, "index", 0, entry, pooled_for_key(inputs, wanted, entry))
    plant_pooled(inputs, "main", 0, entry, pooled_for_latent(inputs, latent, entry))
    keys = oracle.index_k(inputs, oracle.compressed(inputs))[entry]
    assert cosine_similarity(keys, wanted).min() > 1 - FP32
    assert cosine_similarity(oracle.compressed_latent(inputs)[entry], latent).min() > 1 - FP32
    assert inputs.index_query is not None
    asked: Tensor = torch.randn(inputs.index_query.shape, dtype=torch.float64)
    inputs.index_query.copy_(query_for(inputs, asked))
    got = oracle.index_q(inputs)
    assert (got - asked).norm() / asked.norm() < 2**-8, "one rounding to bf16"


@pytest.mark.parametrize("fields", [{}, PREFIX], ids=["tokens", "prefix"])
def test_sampled_keys_are_the_oracles(fields: dict[str, object]) -> None:
    inputs = layer_of("gaussian", (41, 90), **fields)
    entry = torch.tensor([1, 19, 20, 21])
    every = oracle.index_k(inputs, oracle.compressed(inputs))
    assert torch.equal(sampled_keys(inputs, 1, entry), every[inputs.entry_offset[1] + entry])


def test_row_scores_are_those_of_each_row_with_its_own_key() -> None:
    query, weight = scorer_queries(layer_of("gaussian", (90,), rows=3))
    key = torch.randn(3, 128, dtype=torch.float64)
    assert torch.allclose(row_scores(query, weight, key), score(query, key, weight).diagonal(), rtol=1e-12, atol=1e-12)
