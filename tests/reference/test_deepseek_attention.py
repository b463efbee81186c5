import math

import pytest
import torch
from difftest.reference.attention import attention_magnitude, sparse_attention
from difftest.reference.config import load_config
from difftest.reference.deepseek_attention import attend, attn_query, latents
from difftest.reference.formats import FORMATS, round_bf16
from difftest.reference.norm import rms_norm
from difftest.reference.rope import rope_table, rotate
from torch import Tensor

FLASH = load_config("v4-flash")
DIM, SLOTS = 64, 200


def bf16(*shape: int) -> Tensor:
    return torch.randn(*shape).to(torch.bfloat16)


def one_head(logits: list[float], values: list[float], blocks: list[int]) -> Tensor:
    """Output of one head whose slot i has the given dot and value and lies in block blocks[i] of 64 slots."""
    source = torch.zeros(len(logits), 2)
    source[:, 0], source[:, 1] = torch.tensor(logits), torch.tensor(values)
    index = torch.full((1, 64 * (max(blocks) + 1)), -1)
    for slot, block in enumerate(blocks):
        index[0, 64 * block + (index[0, 64 * block : 64 * (block + 1)] >= 0).sum()] = slot
    nothing = torch.zeros(0, 2)
    q = torch.tensor([[[1.0, 0.0]]])
    out, _ = attend(q, nothing, index[:, :0], source, index, torch.tensor([-1e30]), 1.0)
    return out[0, 0, 1]


def test_attention_is_the_exact_one_but_for_its_roundings() -> None:
    """P and the output are off by 2^-9 of themselves; fp32 dots of 64 terms and exp by far less than 2^-12."""
    q, window, compressed = bf16(6, 3, DIM), bf16(150, DIM), bf16(SLOTS, DIM)
    window_index = torch.stack([torch.randperm(150)[:128] for _ in range(6)])
    selected = torch.stack([torch.randperm(SLOTS)[:100] for _ in range(6)])
    selected[:, 90:] = -1
    scene = (q, window, window_index, compressed, selected, torch.randn(3), DIM**-0.5)
    out, lse = attend(*scene)
    exact, exact_lse = sparse_attention(*scene)
    assert out.dtype == torch.bfloat16
    assert (
        (out.double() - exact).abs() <= (2.0**-9 + 2.0**-12) * attention_magnitude(*scene) + exact.abs() * 2.0**-8
    ).all()
    assert (lse - exact_lse).abs().max() < 1e-5
    sliced = attend(*scene, max_bytes=1)
    assert torch.equal(sliced[0], out)


def test_probabilities_are_rounded_to_bf16_before_the_product() -> None:
    """Values 1 and -bf16(e^-1) cancel exactly only if P was rounded; the exact result is not zero."""
    rounded = round_bf16(torch.tensor(math.exp(-1.0))).item()
    assert one_head([0.0, -1.0], [-rounded, 1.0], [0, 0]) == 0
    assert abs(math.exp(-1) - rounded) > 1e-4


def test_the_running_maximum_decides_what_is_rounded() -> None:
    """The larger dot comes a block later: the earlier block's part decays in fp32 and nothing cancels."""
    rounded = round_bf16(torch.tensor(math.exp(-1.0))).item()
    assert one_head([-1.0, 0.0], [1.0, -rounded], [0, 0]) == 0
    late = one_head([-1.0, 0.0], [1.0, -rounded], [0, 1]).item()
    assert late == pytest.approx((math.exp(-1) - rounded) / (1 + math.exp(-1)), rel=0.01)


def test_the_sum_takes_unrounded_probabilities() -> None:
    """One value among 60 slots at e^-1: a sum of rounded P would be off by 60 * |e^-1 - bf16(e^-1)|."""
    out = one_head([0.0] + [-1.0] * 60, [1.0] + [0.0] * 60, [0] * 61).item()
    assert out == round_bf16(torch.tensor(1 / (1 + 60 * math.exp(-1.0)))).item()


def test_an_empty_first_block_is_nan_as_published() -> None:
    nothing, index = torch.zeros(0, 2), torch.full((1, 128), -1)
    index[0, 100] = 0
    out, _ = attend(torch.ones(1, 1, 2), nothing, index[:, :0], torch.ones(1, 2), index, torch.zeros(1), 1.0)
    assert out.isnan().all()


def test_a_window_padded_in_front_is_listed_as_published() -> None:
    """The first tokens' windows: valid indices move to the front and the row is finite."""
    window, nothing = bf16(5, DIM), bf16(0, DIM)
    front = torch.full((1, 128), -1)
    front[0, :5] = torch.arange(5)
    behind = front.roll(-5, 1)
    behind[0, -5:] = torch.arange(5)
    q, sink, none = bf16(1, 2, DIM), torch.zeros(2), front[:, :0]
    outs = [attend(q, window, index, nothing, none, sink, 0.1)[0] for index in (front, behind)]
    assert outs[0].isfinite().all() and torch.equal(outs[0], outs[1])


def test_padding_reads_no_slot() -> None:
    window, compressed = bf16(70, DIM), bf16(20, DIM)
    window[0] = compressed[0] = torch.nan
    index, selected = torch.arange(1, 66)[None], torch.tensor([[3, -1, 7, -1]])
    out, lse = attend(bf16(1, 2, DIM), window, index, compressed, selected, torch.zeros(2), 0.1)
    assert out.isfinite().all() and lse.isfinite().all()


def test_query_norm_rounds_at_every_step() -> None:
    """square, mean, + eps, rsqrt, product and rotation, each to bf16; fp32 noise may tip a row's mean."""
    q = bf16(40, 4, 512)
    table = rope_table(FLASH, "csa", torch.arange(40) * 31)
    mean = round_bf16(round_bf16(q.double().square()).mean(-1, keepdim=True))
    inverse = round_bf16(round_bf16(mean + 1e-6).rsqrt())
    expected = round_bf16(rotate(round_bf16(q.double() * inverse), table))
    got = attn_query(q, 1e-6, table).double()
    assert (got != expected).double().mean() < 0.01
    once = round_bf16(rotate(rms_norm(q, None, 1e-6), table))
    assert (got != once).double().mean() > 0.1


def test_query_norm_does_not_depend_on_the_number_of_heads() -> None:
    """A few heads end in another code path of torch's bf16 rsqrt than many do."""
    q, table = torch.randn(5, 3, DIM).bfloat16(), torch.ones(5, 1, 1, dtype=torch.complex64)
    many = attn_query(q.repeat(1, 32, 1), 1e-6, table)
    assert torch.equal(attn_query(q, 1e-6, table), many[:, :3])


def test_latents_round_after_norm_and_rotation() -> None:
    kv, weight = torch.randn(60, 512), torch.randn(512)
    table = rope_table(FLASH, "csa", torch.arange(60) * 4)
    got = latents(kv, weight, 1e-6, table)
    normed = round_bf16(rms_norm(round_bf16(kv), weight, 1e-6))
    expected = round_bf16(rotate(normed, table))
    assert (got.double() != expected).double().mean() < 0.01
    intended = latents(kv, weight, 1e-6, table, "intended")
    assert torch.equal(intended[:, 448:], got[:, 448:])
    assert (intended[:, :448] != got[:, :448]).double().mean() > 0.5
    step = FORMATS["e4m3fn"].step(torch.ones(1)).item()
    assert ((intended.double() - got.double()).abs() <= step * got.double().abs() + 1e-2).all()
