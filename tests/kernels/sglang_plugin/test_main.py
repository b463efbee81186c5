"""`--check`: what is patched, where, and whether it fits."""

from types import SimpleNamespace

import pytest
from difftest.kernels.sglang_plugin import __main__ as check
from difftest.kernels.sglang_plugin.flags import BF16_INDEX_K
from difftest.kernels.sglang_plugin.targets import BF16_TARGETS

from .conftest import add_module


def run(capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = check.main(["--check"])
    return code, capsys.readouterr().out


def test_without_sglang_it_says_so(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "sglang_version", lambda: None)
    code, said = run(capsys)
    assert code == 125 and "SGLang is not installed here: pip install sglang==0.5.23" in said


def test_a_wrong_flag_is_refused(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BF16_INDEX_K, "2")
    code, said = run(capsys)
    assert code == 1 and "refused" in said and "may only be 0 or 1" in said


@pytest.fixture
def fits(sglang, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The double as the tested SGLang on a machine with a GPU; `load_plugins` loads ours."""
    from difftest.kernels.sglang_plugin import load

    def load_plugins() -> None:
        load()
        sglang.registry.apply_hooks()

    add_module(monkeypatch, "sglang.srt.plugins", {"load_plugins": load_plugins})
    add_module(
        monkeypatch,
        "sglang.srt.plugins.hook_registry",
        {"HookRegistry": sglang.registry, "HookType": SimpleNamespace(AROUND="around")},
    )
    for name in ("check_version", "check_device"):
        monkeypatch.setattr(check, name, lambda: None)
    monkeypatch.setattr(check, "sglang_version", lambda: "0.5.23")
    return sglang


def test_unset_it_lists_what_would_be_patched(fits, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(BF16_INDEX_K, raising=False)
    code, said = run(capsys)
    assert code == 0 and "nothing above is patched" in said and "patched     sglang" not in said
    assert all(target.path in said for target in BF16_TARGETS)


def test_set_it_shows_every_patch_in_place(fits, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BF16_INDEX_K, "1")
    code, said = run(capsys)
    assert (
        code == 0 and said.count("\npatched ") == len(BF16_TARGETS) and f"{len(BF16_TARGETS)} patches in place" in said
    )


def test_a_missing_target_is_refused(fits, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BF16_INDEX_K, "1")
    del fits.indexer.C4Indexer.compute_q
    code, said = run(capsys)
    assert code == 1 and "missing     sglang.srt.layers.attention.dsv4.indexer.C4Indexer.compute_q" in said
    assert "refused: a server would not start" in said
