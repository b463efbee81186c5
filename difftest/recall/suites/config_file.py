"""A long configuration file in INI form, and questions about single values of it: structure instead of prose."""

from ..conversation import Conversation, Expect, Turn
from ..text import Dice

KEYS = ("port", "timeout_ms", "max_clients", "buffer_kb", "retry_limit", "window_size", "shard_count", "ttl_seconds")
SERVICES = ("billing", "search", "upload", "session", "report", "mailer", "cache", "gateway", "audit", "media")
REGIONS = ("north", "south", "east", "west", "central", "coast")
WORDS_A_SECTION = 2 + 3 * len(KEYS)
"""Blank-separated words of one section: two in its header, three in each `key = value`."""
PLACES: dict[str, float] = {"start": 0.02, "middle": 0.5, "end": 0.98}


def _sections(seed: int, length: int, count: int) -> list[tuple[str, dict[str, str]]]:
    """`count` sections with unique names; every section has every key, so only the section tells the values apart."""
    dice = Dice(seed, "config", length)
    found: list[tuple[str, dict[str, str]]] = []
    for number in range(count):
        name = f"{dice.pick(SERVICES)}.{dice.pick(REGIONS)}.{number:04d}"
        found.append((name, {key: dice.digits(5) for key in KEYS}))
    return found


def config_file(seed: int, length: int, depth: str, words: int) -> Conversation:
    """One question about one value of a section at `depth`; the values of its neighbours must not be given."""
    sections = _sections(seed, length, max(3, words // WORDS_A_SECTION))
    at = min(len(sections) - 1, int(PLACES[depth] * len(sections)))
    name, values = sections[at]
    key = Dice(seed, "config key", length, depth).pick(KEYS)
    near = [sections[other][1][key] for other in (at - 1, at + 1) if 0 <= other < len(sections)]
    file = "\n\n".join(
        "\n".join([f"[section {title}]", *(f"{key} = {value}" for key, value in rows.items())])
        for title, rows in sections
    )
    prompt = (
        f"This is a configuration file.\n\n{file}\n\nWhat is the value of {key} in section {name}? "
        "Answer with the value only."
    )
    expect = Expect(contains=(values[key],), excludes=tuple(value for value in near if value != values[key]))
    turn = Turn(({"role": "user", "content": prompt},), expect)
    return Conversation(f"config/{length}/{depth}", "config", length, depth, (turn,))
