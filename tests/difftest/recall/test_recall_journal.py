"""The journal: resumable, torn lines, other settings, two processes, duplicates."""

import json
from pathlib import Path

import pytest

from difftest.recall.conversation import Answer, Expect
from difftest.recall.journal import Exchange, Journal, read_exchanges

SETTINGS = {"seed": 0, "server A": "http://host"}


def exchange(turn: int = 0, status: str = "answered", conversation: str = "needle/338/start") -> Exchange:
    return Exchange(
        server="A",
        conversation=conversation,
        turn=turn,
        suite="needle",
        length=338,
        depth="start",
        digest="d",
        status=status,  # type: ignore[arg-type]
        request={"messages": []},
        expect=Expect(contains=("1",)),
        answer=Answer("1", tool_calls=({"id": "x"},)),
    )


def test_exchanges_survive_and_failed_ones_are_asked_again(tmp_path: Path) -> None:
    with Journal(tmp_path, SETTINGS) as journal:
        journal.add_length("needle/338", 100, 330)
        journal.add(exchange(0))
        journal.add(exchange(1, "failed"))
        journal.add(exchange(2, "refused"))
    with Journal(tmp_path, SETTINGS) as journal:
        assert [turn for _, _, turn in journal.exchanges] == [0, 2]
        assert journal.exchanges["A", "needle/338/start", 0] == exchange(0)
        assert journal.lengths == {"needle/338": {"words": 100, "tokens": 330}}
        journal.add(exchange(1))
    settings, exchanges = read_exchanges(tmp_path / "exchanges.jsonl")
    assert settings == SETTINGS
    assert sorted(one.turn for one in exchanges) == [0, 1, 2]


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    with Journal(tmp_path, SETTINGS) as journal:
        journal.add(exchange(0))
        journal.add(exchange(1))
    file = tmp_path / "exchanges.jsonl"
    file.write_text(file.read_text()[:-40])
    with Journal(tmp_path, SETTINGS) as journal:
        assert list(journal.exchanges) == [("A", "needle/338/start", 0)]
        journal.add(exchange(1))
    assert all(json.loads(line) for line in file.read_text().splitlines())


def test_a_record_is_never_written_twice(tmp_path: Path) -> None:
    with Journal(tmp_path, SETTINGS) as journal:
        journal.add(exchange(0))
        with pytest.raises(ValueError, match="recorded already"):
            journal.add(exchange(0))


def test_other_settings_are_refused(tmp_path: Path) -> None:
    with Journal(tmp_path, SETTINGS):
        pass
    with (
        pytest.raises(ValueError, match="recorded with seed 0, not 1; give another --out"),
        Journal(tmp_path, {**SETTINGS, "seed": 1}),
    ):
        pass


def test_other_prompts_are_refused(tmp_path: Path) -> None:
    with Journal(tmp_path, SETTINGS) as journal:
        journal.add(exchange(0))
        journal.check({"needle/338/start": "d"})
        with pytest.raises(ValueError, match="other prompts for needle/338/start"):
            journal.check({"needle/338/start": "e"})


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    with (
        Journal(tmp_path, SETTINGS),
        pytest.raises(ValueError, match="in use by another run"),
        Journal(tmp_path, SETTINGS),
    ):
        pass


@pytest.mark.parametrize("text", ["not json\n", '{"kind": "settings", "schema": "other/1"}\n', "[1]\n"])
def test_a_foreign_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "exchanges.jsonl").write_text(text)
    with (
        pytest.raises(ValueError, match=r"exchanges.jsonl:1 is not a record of a recall run"),
        Journal(tmp_path, SETTINGS),
    ):
        pass
    assert (tmp_path / "exchanges.jsonl").read_text() == text
