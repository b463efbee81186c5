"""Deterministic English filler: the same seed gives the same sentences on every machine and Python version."""

import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SENTENCES_A_PARAGRAPH = 6
PATTERNS = (
    "{when}, {person} {did} the {adjective} {thing} at {place}.",
    "The {role} of {place} {did} the {thing} {clause}.",
    "{person} and {person} {did} {number} {goods} near {place}, {clause}.",
    "{when}, the {role} {did} {number} {adjective} {goods}.",
    "Nobody at {place} remembered who had {did} the {adjective} {thing}.",
    "{person} wrote to the {role} about the {thing}, {clause}.",
    "There were {number} {goods} beside the {adjective} {thing} at {place}.",
    "{when}, {person} walked from {place} to {place} with the {thing}.",
)


class Dice(random.Random):
    """Seeded choices made from `random()` alone, whose sequence Python guarantees across versions (`choice` is not)."""

    def __init__(self, seed: int, *names: object) -> None:
        digest = hashlib.sha256("/".join(map(str, (seed, *names))).encode()).digest()
        super().__init__(int.from_bytes(digest[:8], "big"))

    def pick(self, options: Sequence[str]) -> str:
        return options[int(self.random() * len(options))]

    def digits(self, count: int) -> str:
        """A number of `count` digits as text, never starting with 0."""
        return str(1 + int(self.random() * 9)) + "".join(str(int(self.random() * 10)) for _ in range(count - 1))


@cache
def vocabulary() -> dict[str, tuple[str, ...]]:
    """The shipped word lists by the name that `PATTERNS` uses."""
    lists = json.loads((Path(__file__).parent / "words.json").read_text())
    return {name: tuple(words) for name, words in lists.items()}


def sentences(seed: int, *names: object) -> Iterator[str]:
    """Endless sentences; `names` separate streams of one seed (two filler texts of one conversation)."""
    dice, words = Dice(seed, "sentences", *names), vocabulary()
    while True:
        parts = dice.pick(PATTERNS).split("{")
        text = parts[0] + "".join(dice.pick(words[name]) + rest for name, rest in (p.split("}", 1) for p in parts[1:]))
        yield text[0].upper() + text[1:]


@dataclass(frozen=True)
class Planted:
    """A sentence to plant at `depth` (0 the start, 1 the end) of a filler text."""

    sentence: str
    depth: float


def filler(seed: int, words: int, planted: Sequence[Planted] = (), *names: object) -> str:
    """Prose of exactly `words` filler words (the last sentence is cut to fit) with `planted` sentences at their depths.

    A longer filler of the same seed and names starts with the shorter one: a length is fitted by changing `words`.
    Paragraphs of six sentences, one blank line between them.
    """
    lines: list[str] = []
    left = words
    for sentence in sentences(seed, *names):
        if left <= 0:
            break
        parts = sentence.split()
        lines.append(sentence if len(parts) <= left else " ".join(parts[:left]).rstrip(",.") + ".")
        left -= len(parts)
    at = sorted(((round(plant.depth * len(lines)), plant.sentence) for plant in planted), reverse=True)
    for place, sentence in at:
        lines.insert(place, sentence)
    paragraphs = [lines[first : first + SENTENCES_A_PARAGRAPH] for first in range(0, len(lines), SENTENCES_A_PARAGRAPH)]
    return "\n\n".join(" ".join(paragraph) for paragraph in paragraphs)
