import pytest

from difftest.report.terminal import short


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
