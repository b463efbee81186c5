"""What a changed selection does to attention: softmax mass that was dropped, and change by cause."""

import torch
from torch import Tensor

from .attention_check import selection_fault
from .reference.attention import attend_layer, attn_query, packed_selection
from .reference.inputs import LayerInputs
from .reference.rope import rope_table
from .selection import as_mask
from .trace import Trace


def lost_mass(inputs: LayerInputs, trace: Trace, baseline: Trace) -> dict[str, float]:
    """Softmax mass, in the baseline's attention, of the entries it selects and the path does not: mean, and the largest
    of any row and head. Empty when the baseline has no latents or a selection is invalid."""
    if "kv" not in baseline or selection_fault(inputs, trace):
        return {}
    window, compressed = baseline["kv"]["window"], baseline["kv"]["compressed"]
    chosen, wanted = trace.value("topk"), baseline.value("topk")
    packed = packed_selection(inputs, wanted)
    width = int(inputs.visible.max()) if len(wanted) else 0
    kept = as_mask(chosen, width)
    total = largest = 0.0
    for row in range(len(wanted)):
        near, far = inputs.window_index[row], wanted[row]
        far = far[far >= 0].long()
        gone = ~kept[row][far]
        if not bool(gone.any()):
            continue
        entries = packed[row][packed[row] >= 0]
        values = torch.cat((window[near[near >= 0]], compressed[entries])).double()
        table = rope_table(inputs.config, inputs.kind, inputs.row_position[row : row + 1])
        query = attn_query(inputs.attn_query[row : row + 1], inputs.config.rms_norm_eps, table)[0]
        logit = query @ values.T * inputs.config.softmax_scale
        whole = torch.logaddexp(logit.logsumexp(-1), inputs.attn_sink.double())
        mass = (logit[:, -len(far) :] - whole[:, None]).exp()[:, gone].sum(-1)
        total += float(mass.mean())
        largest = max(largest, float(mass.max()))
    return {"lost_mass_mean": total / max(1, len(wanted)), "lost_mass_most": largest}


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
