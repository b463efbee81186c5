"""What a changed selection does to attention: softmax mass that was dropped, and change by cause."""

import torch
from torch import Tensor

from .attention_check import selection_fault
from .reference.attention import attend_layer, attn_query, packed_selection
from .reference.chunks import slices
from .reference.inputs import LayerInputs
from .reference.rope import rope_table
from .selection import as_mask
from .trace import Trace

CHUNK_BYTES = {"cpu": 2**20, "cuda": 2**28}
"""Bytes of the latents and logits of the rows whose lost mass is measured together, in fp64."""


def lost_mass(inputs: LayerInputs, trace: Trace, baseline: Trace) -> dict[str, float]:
    """Softmax mass, in the baseline's attention, of the entries it selects and the path does not: mean, and the largest
    of any row and head. Empty when the baseline has no latents or a selection is invalid."""
    if "kv" not in baseline or selection_fault(inputs, trace):
        return {}
    chosen, wanted = trace.value("topk"), baseline.value("topk").long()
    kept = as_mask(chosen, max((1, *inputs.entries))).gather(1, wanted.clamp(min=0))
    gone = (wanted >= 0) & ~kept
    rows = gone.any(1).nonzero()[:, 0]
    if not len(rows):
        return {"lost_mass_mean": 0.0, "lost_mass_most": 0.0}
    mass = _mass(inputs, baseline, rows, gone[rows])
    return {"lost_mass_mean": float(mass.mean(1).sum()) / len(wanted), "lost_mass_most": float(mass.max())}


def _mass(inputs: LayerInputs, baseline: Trace, rows: Tensor, gone: Tensor) -> Tensor:
    """Softmax mass [r, A] fp64 that the selected entries `gone` [r, k] bool hold in the baseline's attention of `rows`
    [r] int64."""
    window, compressed = baseline["kv"]["window"], baseline["kv"]["compressed"]
    config = inputs.config
    near, far = inputs.window_index[rows], packed_selection(inputs, baseline.value("topk"))[rows]
    last = (far >= 0).cumsum(1).argmax(1).tolist()
    query, table = inputs.attn_query[rows], rope_table(config, inputs.kind, inputs.row_position[rows])
    mass = torch.empty(query.shape[:2], dtype=torch.float64, device=query.device)
    row_bytes = 8 * (near.shape[1] + far.shape[1]) * sum(query.shape[1:])
    for part in slices(len(rows), row_bytes, CHUNK_BYTES[query.device.type]):
        slots = 1 + max(last[part])
        index = torch.cat((near[part], far[part, :slots]), 1)
        values = torch.cat((window[near[part].clamp(min=0)], compressed[far[part, :slots].clamp(min=0)]), 1).double()
        logit = attn_query(query[part], config.rms_norm_eps, table[part]) @ values.mT * config.softmax_scale
        logit.masked_fill_(index[:, None] < 0, -torch.inf)
        whole = torch.logaddexp(logit.logsumexp(-1), inputs.attn_sink.double())
        share = (logit[..., -slots:] - whole[..., None]).exp()
        mass[part] = (share * gone[part, None, :slots]).sum(-1)
    return mass


def attention_change(inputs: LayerInputs, trace: Trace, baseline: Trace) -> dict[str, float]:
    """Norm of the change of the attention output over the baseline's norm, in all and by cause.

    relative_error   the path's output against the baseline's.
    selection    the path's selection on the baseline's latents, exact attention: what the selection alone changes.
    format       the path's latents instead of the baseline's, on the path's selection, exact attention.
    arithmetic   the path's output against exact attention on its own selection and latents.
    """
    got, want = trace.value("attention").double(), baseline.value("attention").double()
    size = float(want.norm())

    def share(one: Tensor, two: Tensor) -> float:
        return float((one - two).norm()) / size if size else float((one - two).norm())

    error = (got - want).norm(dim=-1) / want.norm(dim=-1).clamp(min=torch.finfo(torch.float64).tiny)
    metrics = {
        "relative_error": share(got, want),
        "error_worst_head": float(error.max()),
        "lse_error": _largest(trace["attention"]["lse"], baseline["attention"]["lse"]),
    }
    if selection_fault(inputs, trace) or selection_fault(inputs, baseline):
        return metrics
    csa = inputs.kind == "csa"
    mine = trace.value("topk") if csa else None
    theirs = baseline.value("topk") if csa else None
    base, own = baseline["kv"], trace["kv"]
    exact = attend_layer(inputs, theirs, base["window"], base["compressed"])[0]
    reselected = attend_layer(inputs, mine, base["window"], base["compressed"])[0] if csa else exact
    reformatted = attend_layer(inputs, mine, own["window"], own["compressed"])[0]
    return metrics | {
        "selection_error": share(reselected, exact),
        "format_error": share(reformatted, reselected),
        "arithmetic_error": share(got, reformatted),
    }


def _largest(one: Tensor, two: Tensor) -> float:
    same = one == two
    return float((one.double() - two.double()).abs().masked_fill(same, 0.0).max()) if one.numel() else 0.0
