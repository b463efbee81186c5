"""Small layer inputs of every kind, shared by the tests of paths."""

import pytest
from difftest.cases.case import Case
from difftest.cases.generate import generate
from difftest.reference.inputs import LayerInputs

LAYER_OF_KIND = {"csa": 2, "hca": 3, "swa": 0}
RAGGED = Case(
    "ragged",
    "gaussian",
    (701, 413, 3, 130),
    mode="chunked",
    chunk=301,
    rows=10,
    overrides={"index_topk": 64},
)


@pytest.fixture(scope="session", params=["csa", "hca", "swa"])
def ragged(request: pytest.FixtureRequest) -> LayerInputs:
    """Four requests in chunks that are no multiple of 4, one of them without a single entry."""
    return generate(RAGGED, LAYER_OF_KIND[request.param])


@pytest.fixture(scope="session")
def csa() -> LayerInputs:
    return generate(RAGGED, LAYER_OF_KIND["csa"])
