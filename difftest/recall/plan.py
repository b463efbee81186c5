"""Which conversations a live run plays: suites, lengths and depths, fitted to token lengths."""

from collections.abc import Callable
from dataclasses import dataclass

from .conversation import SUITES, Conversation, SuiteName
from .journal import Journal
from .length import Counter, fit
from .suites.config_file import PLACES, config_file
from .suites.needle import DEPTHS, needle
from .suites.secret import secret
from .suites.tools import tools

NEEDLE_LENGTHS = (338, 1000, 2048, 3611, 4509, 5294, 8000, 10498, 12000, 16384, 22597)
"""Prompt lengths of the published needle runs (docs/field-reports) and of the experiment they are compared with."""
CONTROL_LENGTH = 1500
"""At this length a model with index_topk 512 selects every entry: the suite's proof that the model can do it."""
CONVERSATION_LENGTHS = (CONTROL_LENGTH, 4509, 8000, 12000)
CONFIG_LENGTHS = (CONTROL_LENGTH, 8000, 12000)
NINE_DEPTHS = tuple(f"{step / 8:.3f}" for step in range(9))

Builder = Callable[[int, int, str, int], Conversation]


@dataclass(frozen=True)
class SuitePlan:
    """One suite: its builder `(seed, length, depth, words)`, its default lengths, its depths (cells of one length)."""

    build: Builder
    lengths: tuple[int, ...]
    depths: tuple[str, ...]


PLANS: dict[SuiteName, SuitePlan] = {
    "needle": SuitePlan(needle, NEEDLE_LENGTHS, tuple(DEPTHS)),
    "tools": SuitePlan(tools, CONVERSATION_LENGTHS, ("continuation",)),
    "secret": SuitePlan(secret, CONVERSATION_LENGTHS, ("recall",)),
    "config": SuitePlan(config_file, CONFIG_LENGTHS, tuple(PLACES)),
}


@dataclass(frozen=True)
class Cell:
    """One conversation before its length is fitted."""

    suite: SuiteName
    length: int
    depth: str

    @property
    def fitted_as(self) -> str:
        """Cells of one suite and length share their filler: fitted once."""
        return f"{self.suite}/{self.length}"


def lengths_up_to(suite: SuiteName, longest: int) -> tuple[int, ...]:
    """The suite's lengths up to `longest`; the needle goes on by doubling from 32,768 and ends at `longest` itself."""
    lengths = [length for length in PLANS[suite].lengths if length <= longest]
    if suite == "needle":
        length = 32768
        while length < longest:
            lengths.append(length)
            length *= 2
        if longest > max(PLANS[suite].lengths):
            lengths.append(longest)
    return tuple(lengths)


def cells(suites: tuple[SuiteName, ...], lengths: tuple[int, ...], longest: int, nine_depths: bool) -> list[Cell]:
    """The cells of a run. `lengths` replaces the default ones of every suite; ValueError when nothing is left."""
    chosen: list[Cell] = []
    for suite in suites:
        depths = NINE_DEPTHS if nine_depths and suite == "needle" else PLANS[suite].depths
        for length in lengths or lengths_up_to(suite, longest):
            chosen.extend(Cell(suite, length, depth) for depth in depths)
    if not chosen:
        raise ValueError(f"no length of {', '.join(suites)} is at most {longest}; raise --max-length or give --length")
    return chosen


def check_suites(names: list[str]) -> tuple[SuiteName, ...]:
    """Suite names as given on the command line; all of them when none is given."""
    for name in names:
        if name not in SUITES:
            raise ValueError(f"unknown suite {name!r}: choose from {', '.join(SUITES)}")
    return tuple(suite for suite in SUITES if not names or suite in names)


async def build(cell: Cell, seed: int, counter: Counter, journal: Journal) -> Conversation:
    """The conversation of a cell at its length, with the recorded filler if the journal has it, else a fitted one."""
    plan = PLANS[cell.suite]
    if cell.fitted_as not in journal.lengths:
        words, tokens = await fit(
            lambda count: plan.build(seed, cell.length, plan.depths[0], count), cell.length, counter
        )
        journal.add_length(cell.fitted_as, words, tokens)
    return plan.build(seed, cell.length, cell.depth, journal.lengths[cell.fitted_as]["words"])
