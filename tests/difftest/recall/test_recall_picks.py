"""The indexer's picks: decoding, structural rules, difference by layer and token, live servers."""

import base64
import json
from pathlib import Path

import numpy as np
import pytest
from chat_server import Behaviour, ChatServer
from numpy.typing import NDArray
from typer.testing import CliRunner

from difftest.recall.cli import app
from difftest.recall.picks import check_rules, compare_layers, decode_picks, needle_layers

TOPK, LAYERS = 8, 3


def picks(rows: int, seed: int = 0) -> NDArray[np.int32]:
    """Picks that obey every rule: min(visible, k) random distinct visible entries, -1 padded."""
    random = np.random.default_rng(seed)
    made = np.full((rows, LAYERS, TOPK), -1, np.int32)
    for row in range(rows):
        visible = (row + 1) // 4
        for layer in range(LAYERS):
            chosen = random.permutation(visible)[:TOPK]
            made[row, layer, : len(chosen)] = chosen
    return made


def test_decoding_gives_back_what_was_encoded() -> None:
    made = picks(30)
    text = base64.b64encode(made.tobytes()).decode()
    assert (decode_picks(text, 30, TOPK) == made).all()


@pytest.mark.parametrize(
    ("text", "message"), [("%%%", "not base64"), ("AAAA", "no multiple of 30 tokens"), ("", "0 bytes")]
)
def test_what_is_no_picks_is_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode_picks(text, 30, TOPK)


def test_right_picks_break_no_rule() -> None:
    assert check_rules(picks(80)) == []


@pytest.mark.parametrize(
    ("rule", "row", "slot", "value"),
    [
        ("in range", 50, 2, 12),
        ("in range", 50, 2, -2),
        ("count", 50, 7, -1),
        ("padding", 14, 0, -1),
        ("count", 20, 6, 3),
    ],
)
def test_each_rule_is_killed_by_its_mutant(rule: str, row: int, slot: int, value: int) -> None:
    made = picks(80)
    made[row, 1, slot] = value
    if rule == "padding":
        made[row, 1, :4] = [-1, 0, 1, 2]
    if (rule, row) == ("count", 20):
        made[row, 1] = [0, 1, 2, 3, -1, -1, -1, -1]
    findings = check_rules(made)
    assert [(finding.rule, finding.layer, finding.row) for finding in findings] == [(rule, 1, row)]


def test_a_repeated_entry_is_found() -> None:
    made = picks(80)
    made[60, 2, 0] = made[60, 2, 1]
    assert [(finding.rule, finding.layer, finding.row) for finding in check_rules(made)] == [("unique", 2, 60)]


def test_the_difference_is_located() -> None:
    left = picks(3000)
    right = left.copy()
    row, layer = 2500, 1
    missing = next(entry for entry in range(600) if entry not in left[row, layer])
    gone = int(right[row, layer, 5])
    right[row, layer, 5] = missing
    right[:, 2] = right[:, 2, ::-1]
    layers = list(compare_layers(left, right))
    assert layers[0].worst == layers[2].worst == 1.0
    assert (layers[1].worst_row, layers[1].worst) == (row, 7 / 8)
    assert (layers[1].only_a, layers[1].only_b) == ((gone,), (missing,))
    assert layers[1].rows == 3000 - 4 * (TOPK + 1) + 1
    assert layers[1].first_row == 4 * (TOPK + 1) - 1
    assert [TOPK - 1 if token == row else TOPK for token in range(layers[1].first_row, 3000)] == list(layers[1].shared)


def test_selection_that_is_not_exercised_is_said() -> None:
    with pytest.raises(ValueError, match="not exercised"):
        list(compare_layers(picks(35), picks(35)))


def test_shapes_must_match() -> None:
    with pytest.raises(ValueError, match="different prompts or models"):
        list(compare_layers(picks(40), picks(41)))


def test_the_needle_is_looked_for_in_the_last_rows() -> None:
    made = np.full((40, 2, TOPK), -1, np.int32)
    made[39, 0, 3] = 5
    made[10, 1, 3] = 5
    assert needle_layers(made, range(5, 7), 8) == [True, False]


def serve_picks(tmp_path: Path, first: Behaviour, second: Behaviour) -> tuple[int, str]:
    with ChatServer(first) as left, ChatServer(second) as right:
        words = ["serve", "--base-url", left.url, "--against", right.url, "--out", str(tmp_path), "--suite", "needle"]
        words += ["--length", "300", "--length", "400", "--index-topk", str(TOPK), "--picks", "320", "--retries", "0"]
        result = CliRunner().invoke(app, words)
    return result.exit_code, result.output


def test_picks_of_two_live_servers(tmp_path: Path) -> None:
    code, text = serve_picks(tmp_path, Behaviour(picks=picks), Behaviour(picks=lambda rows: picks(rows, 1)))
    assert code == 0, text
    assert "overlap of picks, A and B" in text
    assert "the question picks the needle in" in text
    lines = [json.loads(line) for line in (tmp_path / "picks-320.jsonl").read_text().splitlines()]
    assert [line["layer"] for line in lines] == list(range(len(lines)))
    assert all(len(line["shared"]) == line["rows"] and min(line["shared"]) < TOPK for line in lines)


def test_a_broken_rule_on_a_live_server_is_a_disagreement(tmp_path: Path) -> None:
    def repeated(rows: int) -> NDArray[np.int32]:
        made = picks(rows)
        made[200, 1, 0] = made[200, 1, 1]
        return made

    code, text = serve_picks(tmp_path, Behaviour(picks=picks), Behaviour(picks=repeated))
    assert code == 1, text
    assert "server B, layer slot 1: rule unique broken: 1 rows; row 200" in text


def test_a_server_without_picks_cannot_be_judged(tmp_path: Path) -> None:
    code, text = serve_picks(tmp_path, Behaviour(), Behaviour())
    assert code == 125, text
    assert "start SGLang with --enable-return-indexer-topk" in text
