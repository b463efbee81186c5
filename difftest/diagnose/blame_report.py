"""Blame for people: the answer, one line a stage, and the layers beside each other."""

from ..stages import STAGES, StageName, stages_of
from .blame import Blame, LayerBlame
from .consequence import CONSEQUENCES

WIDE = 12
"""Columns of a stage name."""


def layer_lines(found: LayerBlame) -> list[str]:
    """One layer: the answer, the table of stages, the smallest set, interactions and notes."""
    lines = [f"{found.case} layer {found.layer}, {found.path} against {found.other}: {found.answer}"]
    if found.nothing:
        return lines
    lines += [f"  {stage}: {fail.why}" for stage, fail in found.failed.items()]
    if not found.failed and found.verdict.why:
        lines.append(f"  {found.verdict.why}")
    shares = found.shares
    if shares is None or found.primary is None:
        return lines
    told = CONSEQUENCES[found.primary]
    squares = "; shares of its square" if told.power > 1 else ""
    lines.append(f"  {found.primary}: {told.shown(shares.loss):.4g} ({told.unit}{squares})")
    lines.append(f"    {'stage':<{WIDE}} {'check':<16} {'format':<16} {'alone':>7} {'last':>7} {'share':>7}")
    for stage in stages_of(found.kind):
        if stage in shares.alone:
            fail = found.failed.get(stage)
            check = f"FAILS {fail.rule}" if fail else "ok"
            numbers = (shares.alone[stage], shares.last[stage], shares.shapley.get(stage, 0.0))
            text = " ".join(f"{100 * number:6.1f}%" for number in numbers)
            lines.append(f"    {stage:<{WIDE}} {check:<16} {found.formats[stage]:<16} {text}")
    lines += _set_lines(found)
    lines += _other_losses(found)
    if found.carried:
        carried = ", ".join(found.carried)
        lines.append(f"  carried, not computed again: {carried} (exact stage plus the path's own deviation)")
    return lines


def joined(group: frozenset[StageName]) -> str:
    """A set of stages in stage order, as "index_k + kv"."""
    return " + ".join(stage for stage in STAGES if stage in group)


def _set_lines(found: LayerBlame) -> list[str]:
    shares = found.shares
    assert shares is not None
    if not shares.smallest:
        return ["  no set of stages restores it"]
    first, *rest = (joined(group) for group in shares.smallest)
    lines = [f"  smallest set that restores it: {first} ({100 * shares.remains:.1f}% of the loss remains)"]
    lines += [f"  or: {group}" for group in rest]
    for one in shares.interactions:
        how = "restore more together than apart" if one.share > 0 else "restore the same loss"
        lines.append(f"  interaction: {one.players[0]} and {one.players[1]} {how} ({100 * abs(one.share):.1f}%)")
    return lines


def _other_losses(found: LayerBlame) -> list[str]:
    lines = []
    for name, shares in found.costs.items():
        if name == found.primary or shares.loss <= 0:
            continue
        by = f", restored by {joined(shares.smallest[0])}" if shares.smallest else ""
        lines.append(f"  {name}: {CONSEQUENCES[name].shown(shares.loss):.4g}{by}")
    return lines


def summary_lines(found: Blame) -> list[str]:
    """Which layer first, which most; nothing for one layer."""
    if not found.guilty:
        judged = all(layer.nothing for layer in found.layers)
        return ["nothing to blame"] if judged and len(found.layers) != 1 else []
    if len(found.layers) == 1 or not found.first or not found.most:
        return []
    first, most = found.first, found.most
    worst = f"most: layer {most.layer} ({most.answer}, attention error {most.loss:.4g})"
    count = f"{len(found.guilty)} of {len(found.layers)} layers"
    return [f"first: layer {first.layer} ({first.answer}); {worst}; {count}"]
