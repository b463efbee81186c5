"""Small cases for the tests of `cases`."""

import pytest
import torch
from difftest.cases.case import Case
from difftest.cases.generate import generate
from difftest.reference.inputs import LayerInputs

LAYER = {"swa": 0, "csa": 2, "hca": 3}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def layer_of(family: str, lengths: tuple[int, ...], kind: str = "csa", **fields: object) -> LayerInputs:
    """Inputs of one layer of a throw-away case of `family`."""
    fields = {"rows": 12} | fields
    return generate(Case(f"test-{family}", family, lengths, **fields), LAYER[kind])  # type: ignore[arg-type]
