"""What the environment may say, and what it may not."""

from pathlib import Path

import pytest
from difftest.kernels.sglang_plugin import load
from difftest.kernels.sglang_plugin.flags import BF16_INDEX_K, CAPTURE, CaptureFlags, FlagError, Flags, read_flags


@pytest.mark.parametrize(("given", "on"), [("", False), ("0", False), ("1", True)])
def test_the_flag_is_0_or_1(given: str, on: bool) -> None:
    assert read_flags({BF16_INDEX_K: given}) == Flags(bf16_index_k=on)


@pytest.mark.parametrize("given", ["2", "yes", "true", " 1", "on"])
def test_anything_else_is_one_sentence_and_no_server(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FlagError, match=f"{BF16_INDEX_K} is {given!r} and may only be 0 or 1"):
        read_flags({BF16_INDEX_K: given})
    monkeypatch.setenv(BF16_INDEX_K, given)
    with pytest.raises(SystemExit, match=r"difftest\.kernels\.sglang_plugin: .* may only be 0 or 1"):
        load()


def test_unset_the_plugin_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(BF16_INDEX_K, raising=False)
    monkeypatch.delenv(CAPTURE, raising=False)
    monkeypatch.setattr("difftest.kernels.sglang_plugin.install.install", lambda flags: pytest.fail("installed"))
    load()


def test_capture_has_defaults_and_limits() -> None:
    flags = read_flags({CAPTURE: "/x", "DIFFTEST_CAPTURE_LAYERS": "2,14", "DIFFTEST_CAPTURE_ROWS": "8"})
    assert flags.capture == CaptureFlags(Path("/x"), layers=(2, 14), rows=8)
    assert not flags.bf16_index_k


@pytest.mark.parametrize(
    ("name", "value"),
    [("DIFFTEST_CAPTURE_LAYERS", "2,-1"), ("DIFFTEST_CAPTURE_STEPS", "a"), ("DIFFTEST_CAPTURE_BYTES", "0")],
)
def test_a_wrong_number_is_named(name: str, value: str) -> None:
    with pytest.raises(FlagError, match=name):
        read_flags({CAPTURE: "/x", name: value})
