"""Inputs and checks that the kernel tests share."""

from collections.abc import Callable

import pytest
import torch
from difftest.reference.formats import round_bf16
from torch import Tensor

AssertRounds = Callable[[Tensor, Tensor, Tensor], None]


@pytest.fixture(autouse=True)
def one_thread_and_one_seed() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """The CPU (interpreted kernels), and a GPU (compiled ones) where there is one."""
    name: str = request.param
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device here: the compiled kernels are not run")
    return name


@pytest.fixture(scope="session")
def assert_rounds() -> AssertRounds:
    """assert_rounds(got, exact, rad): every bf16 number lies between the roundings of exact - rad and exact + rad."""

    def check(got: Tensor, exact: Tensor, rad: Tensor) -> None:
        got, exact, rad = got.double().cpu(), exact.double().cpu(), rad.double().cpu().expand(exact.shape)
        inside = (got >= round_bf16(exact - rad)) & (got <= round_bf16(exact + rad))
        assert got.shape == exact.shape
        assert inside.all(), f"{int((~inside).sum())} of {inside.numel()} outside, first at {(~inside).nonzero()[0]}"
        assert (got == round_bf16(exact)).double().mean() > 0.999

    return check
