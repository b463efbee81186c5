"""A recording's compact form: tensors that follow from others are left out, fp32 that is exact in bf16 becomes bf16.

`expand(compact(trace))` equals `trace` bit for bit; `compact` leaves alone whatever would not come back.
"""

from dataclasses import replace

import torch
from torch import Tensor

from ..trace import StageTensors, Trace
from ._live_feed import decode_e4m3
from .flashmla_layout import BLOCKS, DATA_BYTES, NOPE_DIMS, dequantise

LATENTS = ("window", "compressed")


def compact(trace: Trace) -> Trace:
    """`trace` without the tensors that `expand` makes again."""
    stages = {name: dict(tensors) for name, tensors in trace.stages.items()}
    for stage in ("index_k", "index_q"):
        if stage in stages and _same(_from_codes(stages[stage]), stages[stage]["value"]):
            del stages[stage]["value"]
    for name in LATENTS:
        if "kv" in stages and _same(_from_raw(stages["kv"], name), stages["kv"][name]):
            del stages["kv"][name]
    if "attention" in stages:
        narrow = stages["attention"]["value"].to(torch.bfloat16)
        if _same(narrow.float(), stages["attention"]["value"]):
            stages["attention"]["value"] = narrow
    return replace(trace, stages=stages)


def expand(trace: Trace) -> Trace:
    """`trace` with every canonical tensor, in its canonical dtype."""
    stages = {name: dict(tensors) for name, tensors in trace.stages.items()}
    for stage in ("index_k", "index_q"):
        if stage in stages and "value" not in stages[stage]:
            stages[stage] = {"value": _found(_from_codes(stages[stage]), stage), **stages[stage]}
    for name in LATENTS:
        if "kv" in stages and name not in stages["kv"]:
            stages["kv"][name] = _found(_from_raw(stages["kv"], name), f"kv.{name}")
    if "attention" in stages:
        stages["attention"]["value"] = stages["attention"]["value"].float()
    return replace(trace, stages=stages)


def _from_codes(stored: StageTensors) -> Tensor | None:
    if "codes" not in stored or "scale" not in stored or stored["scale"].shape[-1] != 1:
        return None
    return decode_e4m3(stored["codes"]) * stored["scale"]


def _from_raw(stored: StageTensors, name: str) -> Tensor | None:
    raw = stored.get(f"{name}_raw")
    if raw is None:
        return None
    rope = raw[:, NOPE_DIMS:DATA_BYTES].contiguous().view(torch.bfloat16)
    return dequantise(raw[:, :NOPE_DIMS].contiguous(), raw[:, DATA_BYTES : DATA_BYTES + BLOCKS].contiguous(), rope)


def _same(made: Tensor | None, value: Tensor) -> bool:
    """Bitwise equality: a NaN or a negative zero that would not come back counts as different."""
    if made is None or made.shape != value.shape or made.dtype != value.dtype:
        return False
    return torch.equal(made.contiguous().view(torch.int32), value.contiguous().view(torch.int32))


def _found(made: Tensor | None, name: str) -> Tensor:
    if made is None:
        raise ValueError(f"a recording has neither {name} nor the bytes to make it from: record it again")
    return made
