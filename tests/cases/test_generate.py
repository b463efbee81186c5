"""Generated inputs: reproducible, shaped as `LayerInputs` says, paged without sharing."""

from collections.abc import Iterator
from dataclasses import fields, replace

import pytest
import torch
from difftest.cases.case import Case
from difftest.cases.generate import generate
from difftest.reference.inputs import CompressorInputs, LayerInputs
from torch import Tensor

from .conftest import LAYER

SHAPES = [
    Case("shape-prefill", "gaussian", (301, 6, 260), rows=9),
    Case("shape-chunked", "gaussian", (301, 6, 260), mode="chunked", chunk=77, rows=9),
    Case("shape-decode", "gaussian", (301, 6, 260), mode="decode", decode_tokens=5),
    Case("shape-resume", "gaussian", (301, 6, 260), mode="resume", chunk=101, rows=9),
    Case("shape-prefix", "gaussian", (301, 6, 420), mode="decode", decode_tokens=5, pooled_prefix=64),
    Case("shape-every-row", "gaussian", (30, 6), rows=0),
    Case("shape-short", "gaussian", (1, 2, 3), rows=3),
]


def tensors(inputs: LayerInputs) -> Iterator[tuple[str, Tensor]]:
    for field in fields(inputs):
        value = getattr(inputs, field.name)
        parts = fields(value) if isinstance(value, CompressorInputs) else ()
        yield from ((f"{field.name}.{part.name}", getattr(value, part.name)) for part in parts)
        if isinstance(value, Tensor):
            yield field.name, value


def same(left: LayerInputs, right: LayerInputs) -> bool:
    pairs = zip(tensors(left), tensors(right), strict=True)
    return all(name == other and torch.equal(a, b) for (name, a), (other, b) in pairs)


@pytest.mark.parametrize("family", ["gaussian", "needle", "dyadic", "tie-band", "heavy-tailed"])
def test_same_case_same_numbers_whatever_ran_before(family: str) -> None:
    case = Case("again-2117", family, (2117,), rows=4)
    first = generate(case, 2)
    torch.manual_seed(123)
    torch.randn(5)
    generate(Case("other-300", "gaussian", (300,)), 2)
    assert same(generate(case, 2), first)
    assert not same(generate(case, 4), first), "each layer has weights and data of its own"
    assert not same(generate(replace(case, base_seed=1), 2), first)


def test_rows_do_not_change_keys() -> None:
    case = Case("rows-2117", "gaussian", (2117,), rows=4)
    few, many = generate(case, 2), generate(replace(case, rows=9), 2)
    assert few.index is not None and many.index is not None
    assert torch.equal(few.index.kv_score, many.index.kv_score)
    assert torch.equal(few.page_table, many.page_table)


@pytest.mark.parametrize("kind", LAYER)
@pytest.mark.parametrize("case", SHAPES, ids=lambda case: case.id)
def test_shapes_and_dtypes(case: Case, kind: str) -> None:
    inputs = generate(case, LAYER[kind])
    config = inputs.config
    rows, width = len(inputs.row_request), config.head_dim
    assert inputs.kind == kind
    assert inputs.row_position.dtype == inputs.row_request.dtype == inputs.window_index.dtype == torch.int64
    assert inputs.window_index.shape == (rows, config.sliding_window)
    assert inputs.window_kv.shape == (len(inputs.window_request), width)
    assert inputs.window_kv.dtype == inputs.attn_query.dtype == torch.bfloat16
    assert inputs.attn_query.shape == (rows, config.num_attention_heads, width)
    assert inputs.attn_sink.shape == (config.num_attention_heads,) and inputs.kv_norm_weight.shape == (width,)
    assert inputs.attn_sink.dtype == inputs.kv_norm_weight.dtype == torch.float32
    assert (inputs.index is not None) == (inputs.index_query is not None) == (kind == "csa")
    assert (inputs.main is not None) == (kind != "swa")
    for compressor, dim in ((inputs.index, config.index_head_dim), (inputs.main, width)):
        if compressor is not None:
            halves = 2 if kind == "csa" else 1
            assert compressor.kv_score.shape == (inputs.token_offset[-1], 2 * halves * dim)
            assert compressor.ape.shape == (halves * inputs.ratio, dim)
            assert compressor.norm_weight.shape == (dim,)
            assert compressor.pooled_prefix.shape == (sum(inputs.prefix_entries), dim)
            assert {part.dtype for part in vars(compressor).values()} == {torch.float32}
    if inputs.index_query is not None and inputs.index_weight is not None:
        assert inputs.index_query.shape == (rows, config.index_n_heads, config.index_head_dim)
        assert inputs.index_weight.shape == (rows, config.index_n_heads)
        assert inputs.index_query.dtype == inputs.index_weight.dtype == torch.bfloat16


@pytest.mark.parametrize("case", SHAPES, ids=lambda case: case.id)
def test_windows_are_the_last_tokens_up_to_the_row(case: Case) -> None:
    inputs = generate(case, LAYER["swa"])
    size = inputs.config.sliding_window
    for row, (request, position) in enumerate(
        zip(inputs.row_request.tolist(), inputs.row_position.tolist(), strict=True)
    ):
        index = inputs.window_index[row]
        wanted = list(range(max(0, position + 1 - size), position + 1))
        assert (index[: size - len(wanted)] == -1).all(), "-1 only in front, where the window starts before token 0"
        found = index[size - len(wanted) :]
        assert inputs.window_position[found].tolist() == wanted
        assert (inputs.window_request[found] == request).all()
    used = inputs.window_index[inputs.window_index >= 0]
    assert sorted(set(used.tolist())) == list(range(len(inputs.window_kv))), "no latent that no row needs"


@pytest.mark.parametrize("kind", ["csa", "hca"])
@pytest.mark.parametrize("case", SHAPES, ids=lambda case: case.id)
def test_pages_have_one_owner(case: Case, kind: str) -> None:
    inputs = generate(case, LAYER[kind])
    owned = inputs.page_table[inputs.page_table >= 0].tolist()
    assert len(set(owned)) == len(owned)
    assert 0 not in owned and all(page < inputs.num_pages for page in owned)
    for request, entries in enumerate(inputs.entries):
        pages = -(-entries // inputs.page_size)
        assert (inputs.page_table[request] >= 0).tolist() == [
            place < pages for place in range(inputs.page_table.shape[1])
        ]
    slots = inputs.entry_slot.tolist()
    assert len(set(slots)) == len(slots) == inputs.entry_offset[-1]


def test_pages_are_shuffled_and_spare_ones_left() -> None:
    case = Case("pages", "gaussian", (4133,), rows=1, spare_pages=3)
    table = generate(case, 2).page_table[0]
    assert table.tolist() != sorted(table.tolist())
    assert generate(case, 2).num_pages == len(table) + 3
    plain = generate(replace(case, shuffled_pages=False, spare_pages=0), 2)
    assert plain.page_table[0].tolist() == list(range(len(table)))


def test_prefix_tokens_are_those_that_later_entries_need() -> None:
    inputs = generate(Case("prefix", "gaussian", (301, 6), mode="decode", decode_tokens=5, pooled_prefix=64), 2)
    assert inputs.prefix_entries == (64, 0)
    assert inputs.first_token(0) == 252, "entry 64 overlaps with tokens 252 to 255"
    assert inputs.token_offset == (0, 49, 55)


def test_norm_weights_show_a_rounding_to_bf16() -> None:
    inputs = generate(Case("weights", "gaussian", (9,)), 2)
    assert inputs.index is not None
    weight = inputs.index.norm_weight
    assert (weight != weight.bfloat16().float()).float().mean() > 0.9


def test_a_request_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 token"):
        generate(Case("empty", "gaussian", (5, 0)), 2)


def test_unknown_family_and_parameter_are_refused_with_what_exists() -> None:
    with pytest.raises(ValueError, match="needle"):
        generate(Case("x", "needel", (9,)), 2)
    with pytest.raises(ValueError, match="no parameter height; it takes spread, below"):
        generate(Case("x", "tie-band", (9,), params={"height": 1}), 2)
