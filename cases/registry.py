"""All cases, by id and by profile.

Every case of the default profile exceeds 4 * index_topk tokens, or its `selection_note` says that it does not.
"""

from dataclasses import replace

from .case import Case, Profile
from .recorded_cases import RECORDED_CASES

SMOKE: tuple[Profile, ...] = ("smoke", "default", "full", "gpu")
DEFAULT: tuple[Profile, ...] = ("default", "full", "gpu")
FULL: tuple[Profile, ...] = ("full", "gpu")
GPU: tuple[Profile, ...] = ("gpu",)
BRIEF: tuple[Profile, ...] = ("smoke", "default")
BY_NAME: tuple[Profile, ...] = ()

RAGGED = (2999, 2310, 2570)
EDGES = (1, 2, 3, 4, 5, 7, 8, 255, 256, 257, 2047, 2048, 2051, 2052, 2053)
"""Around the first entries, the first page edge and the first token that sees more than 512 entries."""

_FAMILIES = (
    Case("gaussian-2117", "gaussian", (2117,), rows=8, profiles=SMOKE, says="one prefill, 529 entries"),
    Case("dyadic-4217", "dyadic", (4217, 4438), "decode", decode_tokens=3, profiles=SMOKE, says="zero tolerance"),
    Case("outlier-heavy-2999", "outlier-heavy", RAGGED, "chunked", chunk=1021, rows=12, says="large channels"),
    Case("heavy-tailed-2530", "heavy-tailed", (2530,), rows=12, profiles=FULL, says="Student-t, 3 degrees"),
    Case("near-duplicate-2741", "near-duplicate", (2741,), "resume", chunk=1027, rows=12, says="8 clusters of keys"),
    Case("relu-plateau-2613", "relu-plateau", (2613,), rows=12, says="100 positive scores, the rest exactly 0"),
    Case("tie-band-3001", "tie-band", (3001,), rows=12, says="about 419 nearly equal scores around the cut"),
    Case("near-tie-3001", "tie-band", (3001,), rows=12, params={"spread": 2.0**-9}, profiles=FULL, says="a bf16 step"),
    Case("cancellation-2702", "cancellation", (2702,), rows=12, says="large head terms of opposite sign"),
    Case("page-edges-2308", "page-edges", (2303, 2304, 2308), rows=12, says="575, 576 and 577 entries; best at edges"),
    Case(
        "dyadic-32-heads-4217",
        "dyadic",
        (4217, 4438),
        mode="decode",
        decode_tokens=3,
        overrides={"index_n_heads": 32},
        profiles=FULL,
        says="head weights exact too: 128 * 32 heads make the index scale 2^-6",
    ),
    Case("non-finite-2117", "non-finite", (2117,), rows=4, profiles=BY_NAME, says="a NaN input: cannot judge"),
)

_MODES = (
    Case("decode-2571", "gaussian", (2571, 2210), "decode", decode_tokens=6, says="ragged decode across boundaries"),
    Case("resume-2310", "gaussian", (2310, 2999), "resume", chunk=1030, rows=12, profiles=FULL, says="prefix reuse"),
    Case("chunked-4-4133", "gaussian", (4133,), "chunked", chunk=1023, rows=16, profiles=FULL, says="odd chunks"),
    Case("length-edges-2053", "gaussian", EDGES, rows=45, profiles=FULL, says="15 requests at the edges"),
    Case("short-257", "gaussian", (257, 6, 3), "decode", decode_tokens=4, profiles=FULL, says="at most 64 entries"),
)

_NEEDLES = (
    Case("needle-22597", "needle", (22597,), "chunked", chunk=8191, rows=16, brief=4, says="one planted entry a row"),
    Case("needle-5294", "needle", (5294, 3611), rows=16, profiles=FULL, says="where public reports start to fail"),
    Case(
        "needle-near-cut-10498",
        "needle",
        (10498,),
        rows=16,
        params={"margin": 2.0, "distractors": 3, "distractor_gap": 0.5},
        profiles=FULL,
        says="needles little above the cut among similar entries",
    ),
    Case(
        "needle-heavy-tailed-8000",
        "needle",
        (8000,),
        rows=16,
        params={"background": "heavy-tailed"},
        profiles=FULL,
        says="needles among keys and weights with heavy tails",
    ),
)

_OTHER_LAYERS = (
    Case(
        "stack-2117",
        "gaussian",
        (2117,),
        rows=8,
        layers=tuple(range(43)),
        profiles=FULL,
        says="every layer of V4-Flash, each with its own weights",
    ),
    Case("swa-1029", "gaussian", (1029, 130, 7), rows=16, layers=(0, 1), profiles=FULL, says="window only"),
    Case("hca-4500", "gaussian", (4500, 391), rows=16, layers=(3, 21, 41), profiles=FULL, says="ratio 128"),
    Case(
        "hca-decode-4481",
        "gaussian",
        (4481, 258),
        mode="decode",
        decode_tokens=4,
        layers=(3, 41),
        profiles=FULL,
        says="an entry of 128 tokens completes while decoding",
    ),
    Case(
        "dyadic-hca-4217",
        "dyadic",
        (4217, 390),
        mode="decode",
        decode_tokens=3,
        layers=(3, 41),
        profiles=FULL,
        says="zero tolerance at ratio 128",
    ),
    Case(
        "pro-needle-6101",
        "needle",
        (6101,),
        rows=12,
        layers=(2, 30, 60),
        model="v4-pro",
        profiles=FULL,
        says="V4-Pro: 1,024 selected, 128 attention heads",
    ),
)

_LONG = (
    Case(
        "decode-131072",
        "needle",
        (131072,),
        mode="decode",
        decode_tokens=4,
        pooled_prefix=32760,
        layers=(2,),
        profiles=FULL,
        says="32,768 entries, history given pooled",
    ),
    Case(
        "decode-1048576",
        "needle",
        (1048576,),
        mode="decode",
        decode_tokens=8,
        pooled_prefix=262140,
        layers=(2,),
        profiles=GPU,
        says="8 rows over 262,144 entries, a needle each",
    ),
    Case(
        "prefill-22597",
        "gaussian",
        (22597,),
        mode="chunked",
        chunk=8191,
        rows=8192,
        layers=(2,),
        profiles=GPU,
        says="8,192 rows at 22,597 tokens, where gathering keys ran out of memory in service",
    ),
    Case("prefill-8257", "gaussian", (8257,), rows=0, layers=(2,), profiles=GPU, says="every row of a long prefill"),
    Case(
        "decode-ragged-9001",
        "gaussian",
        tuple(2050 + 217 * request for request in range(33)),
        mode="decode",
        decode_tokens=2,
        layers=(2, 42),
        profiles=GPU,
        says="33 requests of different lengths at once",
    ),
    Case(
        "needle-65536",
        "needle",
        (65536,),
        mode="chunked",
        chunk=8191,
        rows=64,
        layers=(2, 42),
        profiles=GPU,
        says="up to the original context length",
    ),
    Case(
        "hca-prefill-16411",
        "gaussian",
        (16411, 8193),
        rows=256,
        layers=(3, 41),
        profiles=GPU,
        says="128 entries and more of ratio 128",
    ),
)

CASES = (
    *_NEEDLES,
    *_FAMILIES,
    *_MODES,
    *(replace(case, profiles=DEFAULT, brief=2) for case in RECORDED_CASES),
    *_OTHER_LAYERS,
    *_LONG,
)


def all_cases() -> dict[str, Case]:
    """Every built-in case by id."""
    return {case.id: case for case in CASES}


def profile(name: Profile) -> list[Case]:
    """Cases that profile `name` runs, in registry order; the quick profiles run each case's first `brief` layers."""
    chosen = [case for case in CASES if name in case.profiles]
    return [replace(case, layers=case.layers[: case.brief]) for case in chosen] if name in BRIEF else chosen
