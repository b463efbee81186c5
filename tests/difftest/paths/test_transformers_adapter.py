from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from difftest.reference.inputs import LayerInputs

from difftest.paths import transformers_adapter
from difftest.paths.base import CannotFeed, get_path
from difftest.paths.oracle import Oracle
from difftest.paths.transformers_adapter import Transformers

MISSING = Transformers().availability()
needs_transformers = pytest.mark.skipif(not MISSING.ok, reason=f"{MISSING.why}: {MISSING.install}")


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@needs_transformers
def test_structure_agrees_with_the_oracle(ragged: LayerInputs, one_thread: None) -> None:
    got, want = Transformers().run(ragged, "case"), Oracle().run(ragged, "case")
    assert list(got.stages) == list(want.stages)
    for stage, tensors in want.stages.items():
        for name, exact in tensors.items():
            mine = got[stage][name]
            assert mine.shape == exact.shape, (stage, name)
            if stage == "topk":
                assert torch.equal(mine.sort(-1).values, exact.sort(-1).values)
                continue
            seen = exact.isfinite()
            assert torch.equal(seen, mine.isfinite()), (stage, name)
            error = (mine.double() - exact.double())[seen].norm()
            assert error <= 1e-6 * exact.double()[seen].norm(), (stage, name)


@needs_transformers
def test_a_pooled_prefix_cannot_be_fed(csa: LayerInputs) -> None:
    with pytest.raises(CannotFeed, match="pooled_prefix"):
        Transformers().run(replace(csa, prefix_entries=(1, 0, 0, 0)), "case")


def test_options_are_checked() -> None:
    assert get_path("transformers:dtype=bf16").declares.pool == "bf16"
    with pytest.raises(ValueError, match="choose fp32 or bf16"):
        Transformers(dtype="fp16")
    with pytest.raises(ValueError, match="choose added or absent"):
        Transformers(hadamard="no")


@pytest.mark.parametrize("found", [None, "5.23.9", "4.57.1"])
def test_missing_or_old_says_what_to_install(monkeypatch: pytest.MonkeyPatch, found: str | None) -> None:
    def version(_: str) -> str:
        if found is None:
            raise transformers_adapter.PackageNotFoundError
        return found

    monkeypatch.setattr(transformers_adapter, "version", version)
    available = Transformers().availability()
    assert not available.ok and "difftest[transformers]" in available.install
