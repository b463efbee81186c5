"""Recipes: seeds, steps, the way to JSON and back, and what a case says about its selection."""

import pytest
from difftest.cases.case import Case


def test_seed_depends_on_id_layer_and_base() -> None:
    case = Case("a-1", "gaussian", (9,))
    seeds = {case.seed(2), case.seed(4), Case("a-2", "gaussian", (9,)).seed(2)}
    assert len(seeds) == 3
    assert Case("a-1", "tie-band", (5, 6), mode="decode").seed(2) == case.seed(2)
    assert Case("a-1", "gaussian", (9,), base_seed=1).seed(2) == case.seed(2) + 1


@pytest.mark.parametrize("mode", ["prefill", "chunked", "decode", "resume"])
def test_steps_cover_every_token_once_in_order(mode: str) -> None:
    lengths = (41, 7, 1)
    case = Case("steps", "gaussian", lengths, mode=mode, chunk=10, decode_tokens=3)  # type: ignore[arg-type]
    for request, length in enumerate(lengths):
        spans = [span for step in case.steps() for span in step if span.request == request]
        tokens = [token for span in spans for token in range(span.start, span.stop)]
        assert tokens == list(range(length))


def test_steps_start_after_a_pooled_prefix() -> None:
    case = Case("prefix", "gaussian", (100, 20), mode="resume", chunk=30, pooled_prefix=10)
    spans = [span for step in case.steps() for span in step]
    assert [(span.start, span.stop) for span in spans if span.request == 0] == [(40, 100)]
    assert [(span.start, span.stop) for span in spans if span.request == 1] == [(0, 20)], "shorter than the prefix"


def test_json_round_trip() -> None:
    case = Case("j-3", "needle", (9, 8), params={"depth": [0.5]}, layers=(2,), profiles=("gpu",))
    assert Case.from_json(case.to_json()) == case
    with pytest.raises(ValueError, match="no field colour"):
        Case.from_json('{"id": "x", "colour": 1}')


def test_selection_note() -> None:
    assert (
        Case("n", "gaussian", (2051,)).selection_note == "selection not exercised: at most 512 of 512 entries visible"
    )
    assert Case("n", "gaussian", (2052, 3)).selection_note == ""
    assert Case("n", "gaussian", (4099,), model="v4-pro").selection_note.startswith("selection not exercised")
    assert Case("n", "gaussian", (9999,), layers=(3,)).selection_note == "no selection in hca layers"
