"""DeepSeek's latents and sparse attention, as published (`model.py` Attention, `kernel.py` sparse_attn)."""

import torch
from torch import Tensor

from .chunks import MAX_BYTES, slices
from .deepseek import ATTENTION_BLOCK, FakeQuant, fp8_fake_quant, rms_norm, rotate


def latents(kv: Tensor, norm_weight: Tensor, eps: float, table: Tensor, fake_quant: FakeQuant = "published") -> Tensor:
    """Latents [., C] bf16 as attention reads them: bf16, norm to bf16, rotation to bf16, fake quantisation of the rest.

    kv [., C]: a token's latent (bf16) or a pooled entry (fp32, rounded to bf16 first). table [., rope_dim / 2].
    """
    rotated = rotate(rms_norm(kv.to(torch.bfloat16), norm_weight, eps), table)
    plain = rotated.shape[-1] - 2 * table.shape[-1]
    return torch.cat((fp8_fake_quant(rotated[..., :plain], fake_quant), rotated[..., plain:]), -1)


def attn_query(q: Tensor, eps: float, table: Tensor) -> Tensor:
    """Attention queries [R, A, C] bf16: square, mean, + eps, rsqrt, product and rotation each rounded to bf16.

    The rsqrt is taken in fp32 and rounded once, as the GPU does. torch on a CPU does so for whole vectors only: bf16
    elements after the last one go through a rounded square root and may end one bf16 step away.
    """
    mean = q.square().mean(-1, keepdim=True) + eps
    return rotate(q * torch.rsqrt(mean.float()).to(q.dtype), table)


def attend(
    q: Tensor,
    window: Tensor,
    window_index: Tensor,
    compressed: Tensor,
    selected: Tensor,
    sink: Tensor,
    scale: float,
    *,
    max_bytes: int = MAX_BYTES,
) -> tuple[Tensor, Tensor]:
    """Online-softmax attention over blocks of 64 slots: window first, then selected; arguments as `sparse_attention`.

    q, window and compressed hold bf16 values; products accumulate in fp32; the sum takes fp32 P, the PV product P in
    bf16; the sink joins the sum at the end. Window indices are moved to the front, -1 behind, as `model.py` lists them:
    a row whose whole first block is -1 gives NaN in the published kernel, and here.
    Returns out [R, A, C] bf16 and lse [R, A] fp32 (natural log, without the sink; the published kernel does not return
    one).
    """
    rows, heads, dim = q.shape
    out = torch.empty(rows, heads, dim, dtype=torch.bfloat16, device=q.device)
    lse = torch.empty(rows, heads, dtype=torch.float32, device=q.device)
    front = window_index.gather(1, (window_index < 0).int().argsort(dim=1, stable=True))
    slots = front.shape[1] + selected.shape[1]
    for part in slices(rows, 4 * (3 * slots * dim + 4 * heads * (dim + ATTENTION_BLOCK)), max_bytes):
        values = torch.cat((_gather(window, front[part]), _gather(compressed, selected[part])), 1)
        valid = torch.cat((front[part] >= 0, selected[part] >= 0), 1)
        out[part], lse[part] = _online_softmax(q[part].float(), values, valid, sink, scale)
    return out, lse


def _gather(source: Tensor, index: Tensor) -> Tensor:
    """source[index] as fp32 [R, slots, C]; zeros where index < 0."""
    if not source.shape[0]:
        return torch.zeros(*index.shape, source.shape[1], dtype=torch.float32, device=source.device)
    return source[index.long().clamp(min=0)].float().masked_fill_((index < 0)[..., None], 0.0)


def _online_softmax(q: Tensor, values: Tensor, valid: Tensor, sink: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Output [r, A, C] fp32 and lse [r, A] of rows q [r, A, C] over values [r, slots, C]."""
    top = torch.full(q.shape[:2], -torch.inf, device=q.device)
    total = torch.zeros(q.shape[:2], device=q.device)
    weighted = torch.zeros_like(q)
    for start in range(0, values.shape[1], ATTENTION_BLOCK):
        block, shown = values[:, start : start + ATTENTION_BLOCK], valid[:, None, start : start + ATTENTION_BLOCK]
        logit = (q @ block.transpose(1, 2)).masked_fill_(~shown, -torch.inf) * scale
        raised = torch.maximum(top, logit.amax(-1))
        decay = (top - raised).exp()
        p = (logit - raised[..., None]).exp()
        total = total * decay + p.sum(-1)
        weighted = weighted * decay[..., None] + p.to(torch.bfloat16).float() @ block
        top = raised
    out = weighted / (total + (sink.float() - top).exp())[..., None]
    return out, top + total.log()
