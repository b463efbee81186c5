"""Small layers of real head widths for tests that run whole paths."""

from dataclasses import replace
from typing import Any

from difftest.cases.case import Case
from difftest.cases.generate import generate
from difftest.reference.inputs import LayerInputs

LAYER = 2
SMALL = {"index_topk": 16, "index_n_heads": 8, "num_attention_heads": 4, "sliding_window": 24}

CASE = Case("small", "gaussian", (203, 90), rows=6, layers=(LAYER,), overrides=SMALL)
"""50 and 22 entries, 16 of them selected; two pages in all."""


def small_case(seed: int = 0, **changes: Any) -> Case:
    return replace(CASE, base_seed=seed, **changes)


def small_inputs(seed: int = 0, **changes: Any) -> LayerInputs:
    return generate(small_case(seed, **changes), LAYER)
