import pytest

from difftest.report.terminal import short
from difftest.text import ranges


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (1, "1"),
        (1.5, "1.5"),
        (280.0, "280"),
        (2.5e-8, "2.5e-8"),
        (0.0031, "0.0031"),
        (3e20, "3e20"),
        (float("inf"), "inf"),
    ],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert short(value) == text


@pytest.mark.parametrize(
    ("numbers", "text"), [([], ""), ([4], "4"), ([2, 3], "2, 3"), ([0, 1, 2, 3, 7, 9, 10, 11], "0-3, 7, 9-11")]
)
def test_runs_of_layers_are_joined(numbers: list[int], text: str) -> None:
    assert ranges(numbers) == text
