"""The kernels' rotary table is the published one, bit for bit."""

import pytest
import torch
from difftest.kernels.rope import Yarn, as_table, rope_table
from difftest.reference.config import load_config
from difftest.reference.rope import rope_table as published


@pytest.mark.parametrize("model", ["v4-flash", "v4-pro"])
def test_equals_the_published_table(model: str) -> None:
    config = load_config(model)
    yarn = Yarn(
        config.compress_rope_theta,
        config.rope_factor,
        config.rope_original_max_position,
        config.rope_beta_fast,
        config.rope_beta_slow,
    )
    positions = torch.cat((torch.arange(4096), torch.randint(1 << 20, (512,)), torch.tensor([(1 << 20) - 1])))
    want = torch.view_as_real(published(config, "csa", positions)).flatten(-2)
    assert torch.equal(rope_table(positions, yarn).double(), want)


def test_default_yarn_is_flash() -> None:
    assert torch.equal(rope_table(torch.arange(64), Yarn()), rope_table(torch.arange(64)))


def test_complex_and_real_tables_are_the_same() -> None:
    table = rope_table(torch.arange(100))
    assert torch.equal(as_table(torch.view_as_complex(table.unflatten(-1, (-1, 2)))), table)


@pytest.mark.parametrize("table", [torch.zeros(4, 32), torch.zeros(4, 64).double(), torch.zeros(64)])
def test_refused_tables(table: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="rope table is"):
        as_table(table)
