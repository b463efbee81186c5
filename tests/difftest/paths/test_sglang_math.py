import math

import pytest
import torch
from difftest.reference.config import load_config

from difftest.paths import _sglang_math as math_

CODES = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)


def test_every_finite_e4m3_code_survives_a_round_trip() -> None:
    assert torch.equal(math_.encode_e4m3(math_.decode_e4m3(CODES)), CODES)


def test_e4m3_midpoints_round_to_the_even_code() -> None:
    value = math_.decode_e4m3(CODES[:127])
    middle = (value[:-1] + value[1:]) / 2
    lower = CODES[:126]
    assert torch.equal(math_.encode_e4m3(middle), lower + (lower & 1))


@pytest.mark.parametrize("value", [449.0, 464.0, 480.0, 500.0, 1e30, math.inf])
def test_e4m3_saturates(value: float) -> None:
    assert math_.decode_e4m3(math_.encode_e4m3(torch.tensor([value, -value]))).tolist() == [448.0, -448.0]


def test_every_e2m1_code_survives_and_negative_zero_does_not_exist() -> None:
    codes = torch.tensor([code for code in range(16) if code != 8], dtype=torch.uint8)
    assert torch.equal(math_.encode_e2m1(math_.decode_e2m1(codes)), codes)
    assert math_.encode_e2m1(torch.tensor([-0.0, -0.1, -0.25])).tolist() == [0, 0, 0]


def test_e2m1_ties_go_down_and_the_next_value_goes_up() -> None:
    tie = torch.tensor(math_.E2M1_THRESHOLDS)
    assert math_.encode_e2m1(tie).tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert math_.encode_e2m1(tie.nextafter(torch.tensor(9.0))).tolist() == [1, 2, 3, 4, 5, 6, 7]


def test_ue8m0_scale_is_the_smallest_power_of_two_that_holds_the_amax() -> None:
    amax = torch.tensor([448.0, 448.1, 224.0, 1.0, 3e-5, 0.0, 1e20])
    scale = math_.decode_ue8m0(math_.ue8m0_scale(amax.unsqueeze(-1), math_.E4M3_MAX))
    needed = amax.double().clamp_min(1e-4) / 448
    assert torch.equal(scale.double(), torch.exp2(needed.log2().ceil()))
    assert torch.equal(math_.encode_ue8m0(scale), math_.ue8m0_scale(amax.unsqueeze(-1), math_.E4M3_MAX))


def test_ue8m0_byte_255_is_nan() -> None:
    assert math_.decode_ue8m0(torch.tensor([255], dtype=torch.uint8)).isnan().all()


def test_raw_scale_has_its_floor_on_the_amax() -> None:
    scale = math_.raw_scale(torch.tensor([[0.0, 1e-5], [3.0, -7.0]]))
    assert scale.flatten().tolist() == pytest.approx([1e-4 / 448, 7 / 448], rel=1e-7)


def test_hadamard_is_the_orthonormal_sylvester_matrix() -> None:
    matrix = torch.ones(1, 1)
    for _ in range(7):
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    got = math_.hadamard(torch.eye(128))
    assert torch.equal(got.sign(), matrix)
    assert torch.allclose(got, matrix / 128**0.5, rtol=2**-23)


def test_rotation_turns_neighbouring_pairs_of_the_tail() -> None:
    table = torch.tensor([[[0.0, 1.0], [1.0, 0.0]]])
    x = torch.tensor([[9.0, 1.0, 2.0, 3.0, 4.0]])
    assert math_.rotate(x, table).tolist() == [[9.0, -2.0, 1.0, 3.0, 4.0]]


def test_rope_tables_of_window_and_compressed_layers_differ_as_configured() -> None:
    config, positions = load_config("v4-flash"), torch.tensor([0, 1, 1000])
    pair = torch.arange(32, dtype=torch.float64)
    plain = torch.outer(positions.double(), 10000.0 ** (-pair / 32))
    assert torch.allclose(math_.rope_table(config, "swa", positions)[..., 0].double(), plain.cos(), atol=1e-3 * 2**-3)
    base = torch.outer(positions.double(), 160000.0 ** (-pair / 32))
    angle = torch.atan2(*math_.rope_table(config, "csa", positions).double().flip(-1).unbind(-1))
    turns = ((angle - base) / (2 * math.pi))[:, 0]
    assert (turns - turns.round()).abs().max() < 1e-4, "the fastest pair is not stretched"
    assert angle[2, 31].item() == pytest.approx(base[2, 31].item() / 16, rel=1e-5), "the slowest is, by the factor"


def test_pooling_weighs_each_channel_by_its_own_gate() -> None:
    kv = torch.tensor([[[1.0, 1.0], [3.0, 5.0]]])
    score = torch.tensor([[[0.0, 2.0], [0.0, -1.0]]])
    ape = torch.tensor([[0.0, 0.0], [0.0, 3.0]])
    assert math_.gated_pool(kv, score, ape).tolist() == [[2.0, 3.0]]


def test_pooling_gives_a_missing_slot_no_weight_whatever_its_bias() -> None:
    lowest = torch.finfo(torch.float32).min
    kv, score = torch.tensor([[[7.0], [3.0]]]), torch.tensor([[[lowest], [-90.0]]])
    assert math_.gated_pool(kv, score, torch.tensor([[50.0], [-50.0]])).item() == 3.0
