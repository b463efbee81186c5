import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from difftest.reference.attention import (
    attend_layer,
    attention_magnitude,
    attn_query,
    latent,
    packed_selection,
    sparse_attention,
)
from difftest.reference.config import load_config
from difftest.reference.inputs import LayerInputs
from difftest.reference.norm import rms_norm
from difftest.reference.rope import rope_table, rotate, rotate_inverse
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

FLASH = load_config("v4-flash")
SCALE = 16**-0.5
ROWS, HEADS, DIM, WINDOW, ENTRIES = 3, 4, 16, 9, 20
CLOSE = 1e-13
"""fp64 with fewer than 100 terms of unit size: 100 * 2^-53 twice, with room for exp."""

Scene = dict[str, Tensor]


def scene(seed: int = 0) -> Scene:
    """Three rows with padding in front, between and behind the valid indices."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return {
        "q": draw(ROWS, HEADS, DIM),
        "window": draw(WINDOW, DIM),
        "window_index": torch.tensor([[-1, -1, 1, 2], [3, 4, 5, 6], [-1, 6, 7, 8]]),
        "compressed": draw(ENTRIES, DIM),
        "selected": torch.tensor([[4, -1, 9], [-1, -1, -1], [1, 2, 19]]),
        "sink": draw(HEADS),
    }


def attend(scene: Scene, **other: Tensor) -> tuple[Tensor, Tensor]:
    return sparse_attention(*(scene | other).values(), SCALE)


def by_hand(scene: Scene) -> tuple[Tensor, Tensor]:
    """Row by row and head by head over the valid slots only."""
    out, lse = torch.zeros(ROWS, HEADS, DIM, dtype=torch.float64), torch.zeros(ROWS, HEADS, dtype=torch.float64)
    for row in range(ROWS):
        near = [scene["window"][i] for i in scene["window_index"][row].tolist() if i >= 0]
        far = [scene["compressed"][i] for i in scene["selected"][row].tolist() if i >= 0]
        for head in range(HEADS):
            logits = [float(scene["q"][row, head] @ value) * SCALE for value in near + far]
            total = sum(map(math.exp, logits)) + math.exp(float(scene["sink"][head]))
            out[row, head] = sum(math.exp(x) / total * value for x, value in zip(logits, near + far, strict=True))
            lse[row, head] = math.log(sum(map(math.exp, logits)))
    return out, lse


def test_is_the_definition() -> None:
    out, lse = attend(scene())
    expected_out, expected_lse = by_hand(scene())
    assert (out - expected_out).abs().max() < CLOSE and (lse - expected_lse).abs().max() < CLOSE


def test_in_slices_is_the_same() -> None:
    whole, sliced = attend(scene()), sparse_attention(*scene().values(), SCALE, max_bytes=1)
    assert all((a - b).abs().max() < CLOSE for a, b in zip(whole, sliced, strict=True))


def test_padding_reads_no_slot() -> None:
    """Slot 0 of both sources is NaN and nobody selects it (contract K9); 0 * NaN would leak through a masked gather."""
    poisoned = scene()
    poisoned["window"][0] = poisoned["compressed"][0] = torch.nan
    out, lse = attend(poisoned)
    assert torch.equal(out, attend(scene())[0]) and torch.equal(lse, attend(scene())[1])


def test_a_selected_nan_does_show() -> None:
    poisoned = scene()
    poisoned["compressed"][19] = torch.nan
    assert attend(poisoned)[0].isnan().flatten(1).any(1).tolist() == [False, False, True]


def test_a_row_without_slots_is_zero() -> None:
    nothing = {"window_index": torch.full((ROWS, 4), -1), "selected": torch.full((ROWS, 3), -1)}
    for sink in (0.0, 200.0, -math.inf):
        out, lse = attend(scene(), **nothing, sink=torch.full((HEADS,), sink))
        assert (out == 0).all() and (lse == -math.inf).all()


def test_sink_identity() -> None:
    """out = out without sink * sigmoid(lse - sink), which also says that lse leaves the sink out."""
    free, lse = attend(scene(), sink=torch.full((HEADS,), -math.inf))
    for sink in (torch.tensor([0.0, 2.0, -1e30, 200.0]), scene()["sink"]):
        out, same_lse = attend(scene(), sink=sink)
        assert torch.equal(lse, same_lse) and out.isfinite().all()
        assert (out - free * (lse - sink.double()).sigmoid()[..., None]).abs().max() < CLOSE


@pytest.mark.parametrize("factor", [1e3, -1e3])
def test_large_dots_stay_finite(factor: float) -> None:
    out, lse = attend(scene(), q=scene()["q"] * factor)
    assert out.isfinite().all() and lse.isfinite().all()


def test_duplicates_count_twice() -> None:
    """A repeated entry changes the output, so duplicates must be caught at the selection."""
    twice = torch.tensor([[4, 4, 9], [-1, -1, -1], [1, 2, 19]])
    once, doubled = attend(scene())[0], attend(scene(), selected=twice)[0]
    assert (once[0] - doubled[0]).abs().max() > 0.01 and torch.equal(once[1:], doubled[1:])


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 2**32), heads=st.permutations(range(HEADS)), slots=st.permutations(range(3)))
def test_heads_and_slots_have_no_order(seed: int, heads: list[int], slots: list[int]) -> None:
    base = scene(seed)
    out, lse = attend(base)
    moved_out, moved_lse = attend(
        base, q=base["q"][:, heads], sink=base["sink"][heads], selected=base["selected"][:, slots]
    )
    assert (moved_out - out[:, heads]).abs().max() < CLOSE and (moved_lse - lse[:, heads]).abs().max() < CLOSE


def test_values_scale_by_powers_of_two() -> None:
    """q / 4 and values * 4: the same dots, so the output is exactly four times as large."""
    base = scene()
    scaled = attend(base, q=base["q"] / 4, window=base["window"] * 4, compressed=base["compressed"] * 4)
    assert torch.equal(scaled[0], attend(base)[0] * 4) and torch.equal(scaled[1], attend(base)[1])


def test_rows_keep_to_their_own_slots() -> None:
    """One-hot values: a row has mass on what it selected and nowhere else."""
    base = scene() | {"compressed": torch.eye(DIM, dtype=torch.float64)}
    picks = torch.tensor([[0, 1], [2, 3], [0, 4]])
    out = attend(base, window_index=torch.full((ROWS, 1), -1), selected=picks)[0]
    for row in range(ROWS):
        assert (out[row] > 0).all(0).nonzero()[:, 0].tolist() == picks[row].tolist()
        assert (out[row] != 0).any(0).sum() == 2


def test_magnitude_sums_absolute_terms() -> None:
    base = scene()
    magnitude = attention_magnitude(*base.values(), SCALE)
    out = attend(base)[0]
    assert (magnitude >= out.abs() - CLOSE).all() and (magnitude > out.abs() + 0.01).any()
    positive = base | {"window": base["window"].abs(), "compressed": base["compressed"].abs()}
    assert torch.equal(attention_magnitude(*positive.values(), SCALE), attend(positive)[0])


def test_an_index_into_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="an index names an entry and there is none"):
        attend(scene(), compressed=torch.zeros(0, DIM))


# ---- queries and latents


def test_latent_and_query_are_norm_then_rotation() -> None:
    kv, weight, table = torch.randn(5, 512), torch.randn(512), rope_table(FLASH, "hca", torch.arange(5))
    assert torch.equal(latent(kv, weight, 1e-6, table), rotate(rms_norm(kv, weight, 1e-6), table))
    q = torch.randn(5, 3, 512).bfloat16()
    assert torch.equal(attn_query(q, 1e-6, table), rotate(rms_norm(q, None, 1e-6), table))
    assert attn_query(q, 1e-6, table).square().mean(-1).sub(1).abs().max() < 1e-5


def test_shifting_all_positions_changes_nothing_after_the_inverse_rotation() -> None:
    """One query and two keys, moved by 1,000; angles up to 1,010 in fp32 are off by 1,010 * 2^-24 a factor."""
    kv, q = torch.randn(2, 512), torch.randn(1, 3, 512)

    def output(shift: int) -> Tensor:
        keys = latent(kv, torch.ones(512), 1e-6, rope_table(FLASH, "csa", torch.tensor([2, 7]) + shift))
        table = rope_table(FLASH, "csa", torch.tensor([9]) + shift)
        query, slots = attn_query(q, 1e-6, table), torch.tensor([[0, 1]])
        out, _ = sparse_attention(query, keys, slots, keys, slots[:, :0], torch.zeros(3), 512**-0.5)
        return rotate_inverse(out, table)

    assert (output(0) - output(1000)).abs().max() < 10 * 1010 * 2.0**-24
    assert (output(0) - output(1000)).abs().max() > 0


# ---- a layer


def layer_latents(inputs: LayerInputs, seed: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    width = inputs.config.head_dim
    return (
        torch.randn(len(inputs.window_kv), width, generator=generator),
        torch.randn(inputs.entry_offset[-1], width, generator=generator),
    )


def test_csa_selection_is_offset_by_the_request(make_layer: Callable[..., LayerInputs]) -> None:
    inputs = make_layer("csa", (90, 41))
    topk = torch.tensor([[0, 5, -1]]).repeat(len(inputs.row_request), 1)
    packed = packed_selection(inputs, topk)
    for row, request in enumerate(inputs.row_request.tolist()):
        first = inputs.entry_offset[request]
        assert packed[row].tolist() == [first, first + 5, -1]
    with pytest.raises(ValueError, match="topk is None"):
        packed_selection(inputs, None)


def test_hca_attends_to_every_visible_entry(make_layer: Callable[..., LayerInputs]) -> None:
    inputs = make_layer("hca", (700, 300))
    packed = packed_selection(inputs, None)
    for row, request in enumerate(inputs.row_request.tolist()):
        visible, first = int(inputs.visible[row]), inputs.entry_offset[request]
        assert packed[row][packed[row] >= 0].tolist() == list(range(first, first + visible))


def test_swa_attends_to_the_window_alone(make_layer: Callable[..., LayerInputs]) -> None:
    inputs = make_layer("swa")
    window, nothing = layer_latents(inputs)
    assert packed_selection(inputs, None).shape == (len(inputs.row_request), 0)
    out, lse = attend_layer(inputs, None, window, nothing)
    assert out.abs().max() > 0 and lse.isfinite().all()


def test_layer_uses_query_positions_and_sink(make_layer: Callable[..., LayerInputs]) -> None:
    inputs = make_layer("hca", (300, 260))
    window, compressed = layer_latents(inputs)
    table = rope_table(inputs.config, "hca", inputs.row_position)
    expected = sparse_attention(
        attn_query(inputs.attn_query, 1e-6, table), window, inputs.window_index, compressed,
        packed_selection(inputs, None), inputs.attn_sink, inputs.config.head_dim**-0.5,
    )  # fmt: skip
    got = attend_layer(inputs, None, window, compressed)
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])
    louder = replace(inputs, attn_sink=inputs.attn_sink + 3)
    assert not torch.equal(attend_layer(louder, None, window, compressed)[0], got[0])
