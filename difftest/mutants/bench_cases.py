"""Small cases on which mutants show: three requests, pages out of order, more entries than are selected.

None of them is a built-in case: they exist for the mutants. Heads of attention and the window are cut down, since no
mutant needs more; everything an index stage reads has its real width.
"""

from dataclasses import replace
from typing import Any

from ..cases.case import Case

SMALL: dict[str, Any] = {"index_topk": 64, "num_attention_heads": 4, "sliding_window": 32}

CHUNKED = Case(
    "mutant-chunked",
    "gaussian",
    (453, 322, 391),
    mode="chunked",
    chunk=121,
    rows=21,
    layers=(2,),
    overrides=SMALL,
    says="chunks that end inside a block, several rows a step, two pages a request",
)
DECODE = Case(
    "mutant-decode",
    "gaussian",
    (451, 3, 323),
    mode="decode",
    decode_tokens=3,
    pooled_prefix=65,
    spare_pages=0,
    layers=(2,),
    overrides=SMALL,
    says="a history given pooled, a request without entries, a pool whose page 0 is in use",
)
RESUMED = Case(
    "mutant-resumed",
    "gaussian",
    (451, 322),
    mode="resume",
    chunk=303,
    rows=12,
    layers=(2,),
    overrides=SMALL,
    says="a prefix hit that ends inside a block",
)
PLATEAU = Case(
    "mutant-plateau",
    "relu-plateau",
    (451, 391),
    rows=8,
    layers=(2,),
    params={"positive": 20},
    overrides=SMALL,
    says="20 positive scores a request, the rest exactly 0",
)
TIES = Case(
    "mutant-near-ties",
    "tie-band",
    (451, 391),
    rows=8,
    layers=(2,),
    params={"spread": 2.0**-9},
    overrides=SMALL,
    says="scores around the cut a bf16 step apart",
)
FLOOR = replace(
    CHUNKED,
    id="mutant-floor",
    overrides={**SMALL, "rms_norm_eps": 1e10},
    says="keys and latents so small that the floor of the scale counts",
)
