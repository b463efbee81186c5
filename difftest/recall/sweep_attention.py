"""What a selection means for attention: the mass a needle holds, and how far the output moves.

In fp32: these are figures about the selection, two digits of which matter, and no path's attention is judged by them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..cases.needle import NEEDLE_HEADS
from ..reference.attention import attn_query
from ..reference.chunks import slices
from ..reference.rope import rope_table
from .sweep_world import World

CHUNK_BYTES = 2**27


@dataclass(frozen=True)
class NeedleCost:
    """What losing the needle costs a row when everything else stays selected, each [R] fp32.

    mass     softmax mass of the needle, mean over the NEEDLE_HEADS heads that look for it.
    mass_all the same over all heads.
    output   norm of the change of the attention output over the output's norm, all heads together.
    """

    mass: Tensor
    mass_all: Tensor
    output: Tensor


def outputs(world: World, chosen: Tensor, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Attention output [r, A, C] fp32 over the window and the entries `chosen` [R, k] (-1 for none), and the softmax
    mass [r, A] of each row's needle (0 where it is not chosen), of the `rows` [r] int64 given, else of all."""
    inputs, rows = world.inputs, torch.arange(len(chosen), device=chosen.device) if rows is None else rows
    table = rope_table(inputs.config, inputs.kind, inputs.row_position[rows])
    query = attn_query(inputs.attn_query[rows], inputs.config.rms_norm_eps, table).float()
    out, mass = torch.empty_like(query), query.new_zeros(query.shape[:2])
    width = inputs.window_index.shape[1] + chosen.shape[1]
    for part in slices(len(query), 4 * width * (2 * query.shape[2] + 3 * query.shape[1]), CHUNK_BYTES):
        near, far = inputs.window_index[rows[part]], chosen[rows[part]].long()
        keys = torch.cat((world.window[near.clamp_min(0)], world.latents[far.clamp_min(0)]), 1)
        valid = torch.cat((near, far), 1) >= 0
        logit = query[part] @ keys.transpose(1, 2) * inputs.config.softmax_scale
        logit = logit.masked_fill(~valid[:, None], -torch.inf)
        sink = inputs.attn_sink[None, :, None].expand(len(logit), -1, 1)
        weight = torch.cat((logit, sink), 2).softmax(2)[..., :-1]
        out[part] = weight @ keys
        needle = torch.cat((torch.full_like(near, -1), far), 1) == world.entry[rows[part], None]
        mass[part] = (weight * needle[:, None]).sum(2)
    return out, mass


def needle_cost(world: World, exact: Tensor) -> tuple[NeedleCost, Tensor]:
    """The cost of losing each needle from the exact selection [R, k], and that selection's output [R, A, C].

    A needle that the exact selection does not hold replaces its last entry first.
    """
    held = (exact == world.entry[:, None]).any(1)
    with_needle = exact.clone()
    with_needle[~held, -1] = world.entry[~held].to(exact.dtype)
    whole, mass = outputs(world, with_needle)
    without, _ = outputs(world, torch.where(with_needle == world.entry[:, None], -1, with_needle))
    cost = NeedleCost(mass[:, :NEEDLE_HEADS].mean(1), mass.mean(1), change(without, whole))
    return cost, whole if bool(held.all()) else outputs(world, exact)[0]


def change(got: Tensor, want: Tensor) -> Tensor:
    """Norm of got - want over the norm of want by row, [R]; both [R, A, C]."""
    size = want.flatten(1).norm(dim=1).clamp_min(torch.finfo(torch.float32).tiny)
    moved: Tensor = (got - want).flatten(1).norm(dim=1) / size
    return moved
