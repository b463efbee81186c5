"""Ball arithmetic: every operation's ball holds what the declared arithmetic really gives, and is not much wider."""

import math

import pytest
import torch
from difftest.reference.compressor import pool_layer
from difftest.reference.formats import FORMATS, round_bf16
from difftest.reference.hadamard import hadamard
from difftest.reference.norm import rms_norm
from difftest.reference.rope import rope_table, rotate

from difftest import ball, bounds
from difftest.ball import UNIT_FP32, Ball
from difftest.metrics import Tally, ordinal, unravel


def test_rounding_forgets_the_radius_away_from_ties():
    exact = torch.tensor([1.001, 1.0, 1.0 + 2.0**-8], dtype=torch.float64)
    rounded = ball.round_to(Ball(exact, torch.full_like(exact, 1e-6)), "bf16")
    assert rounded.mid.tolist() == [1.0, 1.0, 1.0]
    assert rounded.rad.tolist() == [0.0, 0.0, 2.0**-7]


def test_rounding_holds_every_value_of_the_ball():
    torch.manual_seed(0)
    exact = torch.randn(20_000, dtype=torch.float64)
    rad = exact.abs() * 10 ** torch.empty_like(exact).uniform_(-7, -1)
    rounded = ball.round_to(Ball(exact, rad), "bf16")
    for share in (-1.0, -0.7, 0.3, 1.0):
        assert bool(((round_bf16(exact + share * rad) - rounded.mid).abs() <= rounded.rad).all())


@pytest.mark.parametrize("name", ["fp32", "bf16", "e4m3fn", "e2m1", "e2m1_ties_down"])
def test_distance_is_zero_exactly_on_the_preimage(name):
    torch.manual_seed(1)
    exact = torch.randn(5_000, dtype=torch.float64) * 3
    got = FORMATS[name].round(exact)
    assert bool((ball.distance_to(name, exact, got) == 0).all())
    got = got[(got.abs() > 1.05) & (got.abs() < 1.9)].abs()
    assert len(got) > 100
    step = FORMATS[name].step(got)
    assert torch.allclose(ball.distance_to(name, got + 0.75 * step, got), 0.25 * step, rtol=1e-9)
    exact = got + 0.1 * step
    assert bool((ball.distance_to(name, exact, got + step * 0.3) == torch.inf).all())


@pytest.mark.parametrize("roundoff", [UNIT_FP32])
def test_fp32_operations_stay_in_their_ball(roundoff):
    torch.manual_seed(2)
    x = torch.randn(400, 128)
    weight = 1 + 0.1 * torch.randn(128)
    table = torch.polar(torch.ones(400, 32), torch.rand(400, 32) * 6).to(torch.complex128)
    exact = Ball.exact(x)
    done = {
        "norm": (ball.rms_norm(exact, weight, 1e-6, roundoff), _fp32_norm(x, weight)),
        "rotate": (ball.rotate(exact, table, roundoff), _fp32_rotate(x, table)),
        "hadamard": (ball.hadamard(exact, roundoff), _fp32_hadamard(x)),
    }
    for name, (held, got) in done.items():
        error, touched = (got.double() - held.mid).abs(), held.rad > 0
        assert bool((error[~touched] == 0).all())
        ratio = float((error[touched] / held.rad[touched]).max())
        assert 0.001 < ratio <= 1, (name, ratio)


def _fp32_norm(x, weight):
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def _fp32_rotate(x, table):
    pairs = torch.view_as_complex(x[:, 64:].unflatten(-1, (-1, 2)).contiguous()) * table.to(torch.complex64)
    return torch.cat((x[:, :64], torch.view_as_real(pairs).flatten(-2)), -1)


def _fp32_hadamard(x):
    signs = hadamard(torch.eye(128)).float() * 128**0.5
    return x @ signs.sign() * torch.tensor(128.0).rsqrt()


def test_radii_of_inputs_are_carried_on():
    """Moving the input by its radius moves no output by more than the output's radius."""
    torch.manual_seed(3)
    x = torch.randn(200, 128, dtype=torch.float64)
    rad = 1e-3 * torch.rand_like(x)
    weight = 1 + 0.1 * torch.randn(128, dtype=torch.float64)
    table = rope_table(_config(), "csa", torch.arange(200) * 4)
    held = Ball(x, rad)
    for sign in (1.0, -1.0):
        moved = x + sign * rad * torch.randn_like(x).sign()
        assert _inside(ball.rms_norm(held, weight, 1e-6, 0.0), rms_norm(moved, weight, 1e-6))
        assert _inside(ball.rotate(held, table, 0.0), rotate(moved, table))
        assert _inside(ball.hadamard(held, 0.0), hadamard(moved))


def _inside(held, value):
    return bool(((value - held.mid).abs() <= held.rad + 1e-15).all())


def _config():
    from difftest.reference.config import load_config

    return load_config("v4-flash")


def test_published_query_norm_holds_the_published_one():
    from difftest.reference import deepseek_attention

    torch.manual_seed(4)
    q = torch.randn(64, 4, 512).bfloat16()
    table = torch.ones(64, 32, dtype=torch.complex128)
    got = deepseek_attention.attn_query(q, 1e-6, table).double()
    held = ball.published_query_norm(q, 1e-6)
    assert bool(((got - held.mid).abs() <= held.rad).all())
    assert float((held.rad == 0).double().mean()) > 0.9


@pytest.mark.parametrize(("kind", "which"), [("csa", "index"), ("csa", "main"), ("hca", "main")])
def test_pooling_agrees_with_the_reference(bench, kind, which):
    """Midpoints are the reference's; also when a prefix is given pooled."""
    for fields in ({}, {"pooled_prefix": 30} if kind == "csa" else {}):
        inputs = bench.inputs(kind, lengths=(271, 183), **fields)
        want = pool_layer(inputs, which)
        seen = torch.zeros(len(want), dtype=torch.bool)
        for rows, held in bounds.pooled(inputs, which, "fp32"):
            assert float(_far(held.mid, want[rows])) < 1e-13
            seen[rows] = True
        assert bool(seen.all())


def _far(one, two):
    return (one - two).abs().max() if one.numel() else torch.zeros(())


def test_pooling_in_parts_keeps_the_last_piece(bench):
    inputs = bench.inputs("csa", lengths=(14_000,))
    rows = [rows for rows, _ in bounds.pooled(inputs, "main", "fp32", every=3)]
    assert rows[-1].stop == inputs.entry_offset[-1]
    assert sum(part.stop - part.start for part in rows) < inputs.entry_offset[-1]


def test_overflowing_rows_are_counted_not_judged():
    x = torch.tensor([[1e38] * 128, [1.0] * 128])
    held = ball.rms_norm(Ball.exact(x), None, 1e-6, UNIT_FP32)
    assert bool(held.rad[0].isinf().all())
    assert not bool(held.rad[1].isinf().any())
    tally = Tally("fp32", lambda index: {"row": index[0]})
    tally.add(torch.zeros(2, 128, dtype=torch.float64), held)
    assert tally.unjudged == 128
    assert tally.worst.where == {"row": 1}


def test_worst_element_is_the_furthest_in_units_of_its_bound():
    exact = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.float64)
    held = Ball(exact, torch.tensor([[1e-3, 1e-6, 1e-3]], dtype=torch.float64))
    tally = Tally("fp32", lambda index: {"row": index[0], "dim": index[1]})
    tally.add(exact + torch.tensor([[5e-4, 1e-5, 0.0]], dtype=torch.float64), held, start=7)
    assert tally.excess == math.inf  # 1.0005 and 2.00001 are no fp32 numbers
    tally = Tally("fp32", lambda index: {"row": index[0], "dim": index[1]})
    tally.add((exact + torch.tensor([[5e-4, 1e-5, 0.0]], dtype=torch.float64)).float().double(), held, start=7)
    assert tally.worst.where == {"row": 7, "dim": 1}
    assert tally.excess == pytest.approx(10, rel=0.2)
    assert tally.equal == 1


def test_ordinals_count_neighbours():
    for name in ("bf16", "e4m3fn", "e2m1"):
        format_ = FORMATS[name]
        values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -6.0], dtype=torch.float64)
        up = values + format_.step(values.abs())
        up[-1] = values[-1] + format_.step(values[-1:].abs())[0]
        inside = up <= format_.max
        assert (ordinal(name, up) - ordinal(name, values))[inside].tolist() == [1] * int(inside.sum())


def test_unravel():
    assert unravel(23, (2, 3, 4)) == (1, 2, 3)
