import pytest
from difftest.reference.chunks import slices


@pytest.mark.parametrize("total", [0, 1, 9, 10, 11])
@pytest.mark.parametrize("budget", [1, 8, 24, 1000])
def test_slices_cover_everything_once_within_the_budget(total: int, budget: int) -> None:
    parts = list(slices(total, 8, budget))
    assert [item for part in parts for item in range(total)[part]] == list(range(total))
    assert all((part.stop - part.start) * 8 <= max(8, budget) for part in parts)
    assert len(parts) == -(-total // max(1, budget // 8))
