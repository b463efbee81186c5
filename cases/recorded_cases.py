"""The cases whose SGLang traces ship in `recorded/`: small, and each at an edge that hides faults elsewhere.

512 entries (2,048 tokens) is where selection starts, 64 entries a page. Few rows: an attention output is 64 KB a row.
"""

from .case import Case

RECORDED_CASES = (
    Case(
        "rec-prefill-2117",
        "gaussian",
        (2117,),
        rows=6,
        layers=(2,),
        spare_pages=2,
        profiles=(),
        says="one prefill past 4 * k tokens; a tail of one token",
    ),
    Case(
        "rec-chunked-2083-261",
        "gaussian",
        (2083, 261),
        mode="chunked",
        chunk=1021,
        rows=4,
        layers=(2, 3),
        spare_pages=2,
        profiles=(),
        says="ragged chunks that split entries; the second request ends on page 2's first entry",
    ),
    Case(
        "rec-decode-2058-258",
        "gaussian",
        (2058, 258),
        mode="decode",
        decode_tokens=3,
        layers=(0, 2),
        spare_pages=2,
        profiles=(),
        says="decode through the state ring; entries 513 and 63 (the last of a page) are completed by decoded tokens",
    ),
    Case(
        "rec-resume-2310",
        "gaussian",
        (2310,),
        mode="resume",
        chunk=1027,
        rows=3,
        layers=(42,),
        spare_pages=2,
        profiles=(),
        says="a prefix of 1,027 tokens, then the rest: the overlap block comes from the state ring",
    ),
    Case(
        "rec-edges-3-260",
        "gaussian",
        (3, 4, 255, 256, 257, 260),
        rows=6,
        layers=(2,),
        spare_pages=2,
        profiles=(),
        says="0, 1, 63, 64, 64 and 65 entries; selection not exercised",
    ),
)
