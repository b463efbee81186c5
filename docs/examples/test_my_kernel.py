from my_kernel import MyKernel

from difftest.testing import assert_agrees


def test_my_kernel() -> None:
    assert_agrees(MyKernel(), "gaussian-2117", layers=[2])
