"""A fact planted in filler text at the start, the middle or the end, among similar facts that were not asked for."""

from ..conversation import Conversation, Expect, Turn
from ..text import Dice, Planted, filler

DEPTHS: dict[str, float] = {"start": 0.0, "middle": 0.5, "end": 1.0}
COLOURS = ("amber", "crimson", "cobalt", "emerald", "ivory", "scarlet", "violet", "ochre", "indigo", "copper")
CREATURES = ("falcon", "otter", "heron", "badger", "salmon", "lynx", "beetle", "marten", "swallow", "tortoise")
CODE_DIGITS = 7
SIMILAR = 3
"""Similar facts in every prompt: the answer cannot be guessed as the only number there."""
SIMILAR_DEPTHS = (0.2, 0.45, 0.7)


def facts(seed: int, count: int, *names: object, codes: str = "") -> list[tuple[str, str]]:
    """`count` distinct (`colour creature`, code) pairs. Other `codes` give the same creatures other numbers."""
    dice, digits = Dice(seed, "facts", *names), Dice(seed, "codes", codes, *names)
    found: dict[str, str] = {}
    while len(found) < count:
        found.setdefault(f"{dice.pick(COLOURS)} {dice.pick(CREATURES)}", digits.digits(CODE_DIGITS))
    return list(found.items())


def sentence(name: str, code: str) -> str:
    return f"The access code of the {name} is {code}."


def question(name: str) -> str:
    return f"What is the access code of the {name}? Answer with the code only."


def needle(seed: int, length: int, depth: str, words: int) -> Conversation:
    """One question about one planted fact; the depths of a length differ in the codes, not in the words around them.

    Args: `length` names the cell and separates the streams, `words` is the amount of filler that makes the prompt that
    long, `depth` one of `DEPTHS` or a fraction as text.
    """
    share = DEPTHS[depth] if depth in DEPTHS else float(depth)
    (name, code), *others = facts(seed, 1 + SIMILAR, length, codes=depth)
    planted = [Planted(sentence(*other), at) for other, at in zip(others, SIMILAR_DEPTHS, strict=True)]
    text = filler(seed, words, [*planted, Planted(sentence(name, code), share)], "needle", length)
    prompt = f"Read this text carefully.\n\n{text}\n\n{question(name)}"
    turn = Turn(
        ({"role": "user", "content": prompt},), Expect(contains=(code,), excludes=tuple(other for _, other in others))
    )
    return Conversation(f"needle/{length}/{depth}", "needle", length, depth, (turn,))
