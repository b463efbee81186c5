from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from difftest.reference import oracle
from difftest.reference.compressor import Compressor, compressor_inputs
from difftest.reference.inputs import CompressorInputs, LayerInputs
from difftest.reference.rope import rope_table, rotate
from torch import Tensor

MakeLayer = Callable[..., LayerInputs]
Stages = dict[str, dict[str, Tensor]]
REORDERED = 2.0**-40
"""fp64 sums of a few hundred terms in another order (2^-44), carried through the norms and the softmax."""


def assert_same(a: Stages, b: Stages) -> None:
    """Every tensor equal up to the order of fp64 sums, infinities in the same places, selections exactly."""
    assert a.keys() == b.keys()
    for stage, tensors in a.items():
        for name, tensor in tensors.items():
            other = b[stage][name]
            if stage == "topk":
                assert torch.equal(tensor, other)
                continue
            assert torch.equal(tensor.isfinite(), other.isfinite()), (stage, name)
            torch.testing.assert_close(tensor, other, rtol=REORDERED, atol=REORDERED, msg=f"{stage}.{name} differs")


def rows_of(stages: Stages, rows: Tensor, width: int) -> Stages:
    """The tensors that have a row axis, at `rows`; scores cut to `width`."""
    kept = {
        stage: stages[stage] for stage in ("index_q", "head_weight", "score", "topk", "attention") if stage in stages
    }
    cut = {stage: {name: tensor[rows] for name, tensor in tensors.items()} for stage, tensors in kept.items()}
    if "score" in cut:
        cut["score"]["value"] = cut["score"]["value"][:, :width]
    return cut


def test_stages_by_layer_kind(make_layer: MakeLayer) -> None:
    chain = ["compressed", "index_k", "index_q", "head_weight", "score", "topk", "kv", "attention"]
    assert list(oracle.run(make_layer("csa"))) == chain
    assert list(oracle.run(make_layer("hca"))) == list(oracle.run(make_layer("swa"))) == ["kv", "attention"]


@pytest.mark.parametrize("kind", ["csa", "hca", "swa"])
def test_small_slices_change_nothing(make_layer: MakeLayer, kind: str) -> None:
    inputs = make_layer(kind, (300, 171))
    assert_same(oracle.run(inputs, max_bytes=2**12), oracle.run(inputs))


@pytest.mark.parametrize("kind", ["csa", "hca", "swa"])
def test_pages_do_not_exist_for_the_oracle(make_layer: MakeLayer, kind: str) -> None:
    inputs = make_layer(kind)
    moved = replace(inputs, page_table=inputs.page_table.flip(1) + 3, num_pages=inputs.num_pages + 3)
    assert_same(oracle.run(moved), oracle.run(inputs))


@pytest.mark.parametrize("kind", ["csa", "hca", "swa"])
def test_requests_do_not_see_each_other(
    make_layer: MakeLayer, reorder_requests: Callable[..., LayerInputs], kind: str
) -> None:
    inputs = make_layer(kind, (300, 171, 260))
    moved = reorder_requests(inputs, (2, 0, 1))
    rows = torch.arange(len(inputs.row_request))
    width = int(inputs.visible.max())
    assert_same(rows_of(oracle.run(moved), rows, width), rows_of(oracle.run(inputs), rows, width))


def cut_after(inputs: LayerInputs, position: int) -> tuple[LayerInputs, Tensor]:
    """A one-request layer as it stood right after token `position`, and which rows it still has."""
    length, rows = position + 1, (inputs.row_position <= position).nonzero()[:, 0]

    def cut(read: CompressorInputs | None) -> CompressorInputs | None:
        return None if read is None else replace(read, kv_score=read.kv_score[:length])

    shorter = replace(
        inputs,
        lengths=(length,),
        row_request=inputs.row_request[rows],
        row_position=inputs.row_position[rows],
        index=cut(inputs.index),
        main=cut(inputs.main),
        index_query=None if inputs.index_query is None else inputs.index_query[rows],
        index_weight=None if inputs.index_weight is None else inputs.index_weight[rows],
        window_index=inputs.window_index[rows],
        attn_query=inputs.attn_query[rows],
    )
    return shorter, rows


@pytest.mark.parametrize("kind", ["csa", "hca", "swa"])
def test_whole_prefill_equals_decode_at_every_row(make_layer: MakeLayer, kind: str) -> None:
    """A row's result does not change when later tokens arrive."""
    inputs = make_layer(kind, (270,), rows=10)
    whole = oracle.run(inputs)
    for position in inputs.row_position.tolist():
        shorter, rows = cut_after(inputs, position)
        width = int(shorter.visible.max())
        assert_same(rows_of(oracle.run(shorter), rows - rows[0], width), rows_of(whole, rows, width))


@pytest.mark.parametrize("mode", ["prefill", "chunked", "decode", "resume"])
@pytest.mark.parametrize(("kind", "which"), [("csa", "index"), ("csa", "main"), ("hca", "main")])
def test_steps_through_the_stateful_compressor_equal_the_layer(
    make_layer: MakeLayer, mode: str, kind: str, which: str
) -> None:
    inputs = make_layer(kind, (300, 171), mode=mode, chunk=37)
    read = compressor_inputs(inputs, which)
    whole = oracle.pool_layer(inputs, which)
    for request, length in enumerate(inputs.lengths):
        compressor = Compressor(read.ape, inputs.ratio, read.ape.shape[1])
        tokens = read.kv_score[inputs.token_offset[request] : inputs.token_offset[request + 1]]
        spans = [span for step in inputs.steps for span in step if span.request == request]
        fed = torch.cat([compressor.feed(tokens[span.start : span.stop]) for span in spans])
        assert spans[-1].stop == length
        assert torch.equal(fed, whole[inputs.entry_offset[request] : inputs.entry_offset[request + 1]])


def test_latents_can_be_stored_in_fp32(make_layer: MakeLayer) -> None:
    inputs = make_layer("csa")
    assert torch.equal(oracle.compressed_latent(inputs, dtype=torch.float32), oracle.compressed_latent(inputs).float())


def test_output_is_rotated_back(make_layer: MakeLayer) -> None:
    """An fp32 table has modulus 1 within 2^-23."""
    inputs = make_layer("swa")
    attention = oracle.run(inputs)["attention"]["value"]
    rotated = oracle.output(inputs, rotate(attention, rope_table(inputs.config, "swa", inputs.row_position)))
    assert (rotated - attention).abs().max() < 2.0**-21 * attention.abs().max()


def test_a_planted_entry_is_selected(make_layer: MakeLayer) -> None:
    """Pooled key 5 is made the row's own query direction; all heads weigh +1 and it must win over Gaussian entries."""
    inputs = make_layer("csa", (300,), mode="decode", decode_tokens=1)
    keys = oracle.index_k(inputs, oracle.compressed(inputs))
    queries = oracle.index_q(inputs)
    keys[5] = queries[0].sum(0)
    weights = torch.ones(1, queries.shape[1], dtype=torch.float64)
    selected = oracle.topk(inputs, oracle.score(inputs, keys, queries, weights))
    assert 5 in selected[0].tolist()
