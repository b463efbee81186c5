"""Who is to blame, as arithmetic on a cost function over sets: smallest restoring set, shares, interactions."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import factorial
from typing import Generic, TypeVar

Player = TypeVar("Player", bound=Hashable)

RESTORED = 0.1
"""A set restores the quality when it leaves at most this share of the loss."""

SILENT = 0.01
"""A player that changes less than this share of the loss, alone or as the last one, takes no part in mixtures."""

MOST_PLAYERS = 6
"""Players over whose subsets shares are computed exactly (64 mixtures); of more, the least influential stay out."""

NOTABLE = 0.1
"""What has less than this share of the loss is not told: an interaction, or a format beside a bug."""


@dataclass(frozen=True)
class Interaction(Generic[Player]):
    """Two players together against their separate effects, as a share of the loss.

    Positive: replacing both restores more than the sum of each (either one alone hides behind the other). Negative:
    replacing either one restores what both would (the same loss is counted twice).
    """

    players: tuple[Player, Player]
    share: float


@dataclass
class Shares(Generic[Player]):
    """What a loss is made of.

    loss       with nothing replaced.
    alone      share of the loss that replacing this player alone removes; `last`: share that comes back when it is
               the only one not replaced.
    shapley    its average share over all orders of replacement; the shares of the active players add up to 1 minus
               what no replacement removes.
    smallest   the smallest sets whose replacement restores the quality (every one of that size).
    remains    share of the loss left with the first of `smallest` replaced, or with all if there is none.
    """

    loss: float
    alone: dict[Player, float] = field(default_factory=dict)
    last: dict[Player, float] = field(default_factory=dict)
    shapley: dict[Player, float] = field(default_factory=dict)
    smallest: list[frozenset[Player]] = field(default_factory=list)
    remains: float = 0.0
    interactions: list[Interaction[Player]] = field(default_factory=list)


def share_out(players: Sequence[Player], cost: Callable[[frozenset[Player]], float]) -> Shares[Player]:
    """Shares of the loss `cost(nothing replaced)` among `players`; cost(set) is the loss with the set replaced.

    Shapley values (Shapley 1953) over the players that matter, exactly: every subset of theirs is evaluated. Players
    that change nothing on their own, first or last, are not mixed further.
    """
    everyone, nobody = frozenset(players), frozenset[Player]()
    loss = cost(nobody)
    made = Shares[Player](loss)
    if loss <= 0:
        return made
    gone = cost(everyone)
    for player in players:
        made.alone[player] = (loss - cost(frozenset({player}))) / loss
        made.last[player] = (cost(everyone - {player}) - gone) / loss
    weight = {player: max(abs(made.alone[player]), abs(made.last[player])) for player in players}
    active = sorted((p for p in players if weight[p] > SILENT), key=lambda p: -weight[p])[:MOST_PLAYERS]
    active = [player for player in players if player in active]
    made.shapley = {player: value / loss for player, value in shapley(active, cost).items()}
    made.smallest, made.remains = _smallest(active, everyone, cost, loss)
    made.interactions = _interactions(active, cost, loss)
    return made


def shapley(players: Sequence[Player], cost: Callable[[frozenset[Player]], float]) -> dict[Player, float]:
    """Average reduction of the cost by each player over all orders in which players join."""
    count = len(players)
    out = {}
    for player in players:
        others = [other for other in players if other != player]
        total = 0.0
        for size in range(count):
            share = factorial(size) * factorial(count - size - 1) / factorial(count)
            for group in combinations(others, size):
                before = frozenset(group)
                total += share * (cost(before) - cost(before | {player}))
        out[player] = total
    return out


def _smallest(
    active: Sequence[Player], everyone: frozenset[Player], cost: Callable[[frozenset[Player]], float], loss: float
) -> tuple[list[frozenset[Player]], float]:
    for size in range(1, len(active) + 1):
        sets = [frozenset(group) for group in combinations(active, size)]
        good = [group for group in sets if cost(group) <= RESTORED * loss]
        if good:
            good.sort(key=cost)
            return good, cost(good[0]) / loss
    return [], cost(everyone) / loss


def _interactions(
    active: Sequence[Player], cost: Callable[[frozenset[Player]], float], loss: float
) -> list[Interaction[Player]]:
    found = []
    for one, two in combinations(active, 2):
        apart = 2 * loss - cost(frozenset({one})) - cost(frozenset({two}))
        together = loss - cost(frozenset({one, two}))
        share = (together - apart) / loss
        if abs(share) > NOTABLE:
            found.append(Interaction((one, two), share))
    return sorted(found, key=lambda interaction: -abs(interaction.share))
