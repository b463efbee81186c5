"""Filler text and grading: deterministic, of exact size, and strict about whole numbers."""

import pytest

from difftest.recall.conversation import Answer, Expect, grade, holds
from difftest.recall.plan import PLANS
from difftest.recall.text import Planted, filler


def test_filler_is_the_same_everywhere() -> None:
    """A recorded sentence: a change of generator, vocabulary or Python's `random()` would change every prompt."""
    assert filler(1, 12).startswith("Nobody at the upper terrace remembered who had returned the uneven bell.")


@pytest.mark.parametrize("words", [0, 1, 7, 500])
def test_filler_has_exactly_the_words_asked_for(words: int) -> None:
    assert len(filler(3, words).split()) == words


def test_longer_filler_starts_with_the_shorter() -> None:
    assert filler(3, 400).startswith(filler(3, 300).rsplit(" ", 20)[0])


def test_streams_and_seeds_differ() -> None:
    texts = {filler(3, 50), filler(4, 50), filler(3, 50, (), "other")}
    assert len(texts) == 3


@pytest.mark.parametrize(("depth", "low", "high"), [(0.0, 0.0, 0.0), (0.5, 0.47, 0.53), (1.0, 0.97, 1.0)])
def test_planted_sentence_lies_at_its_depth(depth: float, low: float, high: float) -> None:
    words = filler(5, 1000, [Planted("HERE.", depth)]).split()
    assert low <= words.index("HERE.") / len(words) <= high


@pytest.mark.parametrize("suite", list(PLANS))
def test_prompts_hold_what_is_asked_for_and_depend_on_the_seed_only(suite: str) -> None:
    plan = PLANS[suite]  # type: ignore[index]
    for depth in plan.depths:
        talk = plan.build(7, 1500, depth, 600)
        assert talk.digest() == plan.build(7, 1500, depth, 600).digest() != plan.build(8, 1500, depth, 600).digest()
        for turn, part in enumerate(talk.turns):
            prompt = str(talk.messages(turn))
            wanted = [value for value in part.expect.contains if value != "ok"]
            assert all(prompt.count(value) >= 1 for value in wanted)
            assert not set(part.expect.contains) & set(part.expect.excludes)


@pytest.mark.parametrize(
    ("text", "value", "expected"),
    [
        ("The code is 1,234,567.", "1234567", True),
        ("1 234 567", "1234567", True),
        ("12-34567", "1234567", True),
        ("91234567", "1234567", False),
        ("12345678", "1234567", False),
        ("**1234567**", "1234567", True),
        ("Word: LANTERN!", "lantern", True),
        ("lanterns", "lantern", False),
    ],
)
def test_values_are_found_as_whole_tokens(text: str, value: str, expected: bool) -> None:
    assert holds(text, value) is expected


def call(name: str, arguments: str) -> Answer:
    return Answer(tool_calls=({"function": {"name": name, "arguments": arguments}},), finish_reason="tool_calls")


@pytest.mark.parametrize(
    ("expect", "answer", "why"),
    [
        (Expect(contains=("111",)), Answer("it is 222"), "'111' is not in the answer"),
        (Expect(contains=("111",), excludes=("222",)), Answer("222"), "gave '222', a similar fact"),
        (Expect(contains=("111",), excludes=("222",)), Answer("111 or 222"), "also gave '222'"),
        (Expect(contains=("111",)), Answer("well,", finish_reason="length"), "cut at the token limit"),
        (Expect(contains=("111",)), Answer("", reasoning="111"), "not in the answer"),
        (Expect(tool="read_log"), Answer("I read it"), "called no tool instead of read_log"),
        (Expect(tool="read_log"), call("write_log", "{}"), "called write_log"),
        (Expect(tool="read_log"), call("read_log", "{machine"), "not JSON"),
        (Expect(tool="read_log", arguments={"machine": "a b"}), call("read_log", '{"machine": "c"}'), "wanted"),
    ],
)
def test_wrong_answers_are_named(expect: Expect, answer: Answer, why: str) -> None:
    graded = grade(expect, answer)
    assert not graded.passed
    assert why in graded.why


def test_right_answers_pass() -> None:
    assert grade(Expect(contains=("1234567",), excludes=("7654321",)), Answer("It is 1,234,567.")).passed
    assert grade(Expect(tool="t", arguments={"m": "Amber Fox"}), call("t", '{"m": " amber fox "}')).passed
