"""A secret told in the first turn and asked for after several turns of unrelated text."""

from ..conversation import Conversation, Expect, Message, Turn
from ..text import Dice, filler
from .needle import facts

UNRELATED_TURNS = 4
WORDS = ("lantern", "orchard", "granite", "meadow", "thistle", "harbour", "juniper", "pebble", "willow", "ember")


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def secret(seed: int, length: int, depth: str, words: int) -> Conversation:
    """Six requests: tell, four unrelated, ask. `depth` is not used to place anything; it names the cell (`recall`).

    The secret is a word and a number, so that half an answer is told from a whole one. Each unrelated turn asks for the
    one number its own text contains, which shows whether the server follows at all.
    """
    dice = Dice(seed, "secret", length)
    word, number = dice.pick(WORDS), dice.digits(5)
    opening = Turn(
        (_user(f"My secret is the word {word} and the number {number}. Keep it and answer with OK."),),
        Expect(contains=("ok",)),
        _assistant("OK"),
    )
    turns = [opening]
    share, rest = divmod(words, UNRELATED_TURNS)
    for part, (name, code) in enumerate(facts(seed, UNRELATED_TURNS, "secret", length)):
        text = filler(seed, share + (rest if part == 0 else 0), (), "secret", length, part)
        ask = f"The badge of the {name} is {code}. Also read this:\n\n{text}\n\nWhich number is on that badge? "
        turns.append(Turn((_user(ask + "Answer with the number only."),), Expect(contains=(code,)), _assistant(code)))
    last = _user("What was the secret that I told you at the beginning? Answer with the word and the number only.")
    turns.append(Turn((last,), Expect(contains=(word, number))))
    return Conversation(f"secret/{length}/{depth}", "secret", length, depth, tuple(turns))
