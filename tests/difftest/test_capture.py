"""Captures: a round trip of every layer kind, validation of tensors, replay through a path, and the dumper's files."""

import importlib.util
import json
import pickle
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from difftest.cases.case import Case
from difftest.cases.generate import generate
from difftest.reference.inputs import Span
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from difftest.capture import Capture, input_tensors, load_capture, load_captures, validate
from difftest.data_cli import capture_app
from difftest.dumper_import import read_traffic
from difftest.paths.base import get_path


def _files() -> ModuleType:
    name = "difftest_checkpoint_files"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / "checkpoint_files.py")
        assert spec and spec.loader
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


SMALL = {"index_n_heads": 4, "num_attention_heads": 2, "index_topk": 8}


def case_of(layer: int) -> Case:
    return Case(f"small-{layer}", "gaussian", (260, 135), rows=6, layers=(layer,), overrides=SMALL)


@pytest.mark.parametrize("layer", [0, 2, 3])
def test_a_capture_round_trips_bit_for_bit(tmp_path: Path, layer: int) -> None:
    inputs = generate(case_of(layer), layer)
    raw = torch.arange(8448, dtype=torch.int64).to(torch.uint8)
    Capture(case_of(layer), inputs, "test", {"index_k": raw}).save(tmp_path / "layer.safetensors")
    (got,) = load_captures(tmp_path)
    for name, tensor in input_tensors(inputs).items():
        assert torch.equal(input_tensors(got.inputs)[name], tensor), name
    assert input_tensors(got.inputs).keys() == input_tensors(inputs).keys()
    assert (got.inputs.config, got.inputs.steps, got.inputs.lengths) == (inputs.config, inputs.steps, inputs.lengths)
    assert torch.equal(got.cache["index_k"], raw)
    assert got.origin == "test"
    ((case, _),) = load_capture(f"capture:{tmp_path / 'layer.safetensors'}")
    assert case.config == inputs.config


def test_a_replayed_capture_gives_the_same_trace(tmp_path: Path) -> None:
    inputs = generate(case_of(2), 2)
    Capture(case_of(2), inputs).save(tmp_path / "layer.safetensors")
    ((_, replayed),) = load_capture(tmp_path)
    path = get_path("sglang-fp8-model")
    first, second = path.run(inputs, "a"), path.run(replayed, "b")
    for stage, tensors in first.stages.items():
        for name, tensor in tensors.items():
            torch.testing.assert_close(second[stage][name], tensor, rtol=0, atol=0, equal_nan=True)


def mutants() -> dict[str, tuple[str, Tensor | None]]:
    inputs = generate(case_of(2), 2)
    table = inputs.page_table.clone()
    table[1, 0] = table[0, 0]
    index = inputs.window_index.clone()
    index[0, 0] = len(inputs.window_request)
    query = inputs.index_query
    assert query is not None and inputs.index is not None
    broken = query.clone()
    broken[1, 2, 3] = torch.inf
    return {
        r"lacks 'attn_sink'": ("attn_sink", None),
        r"needs tensor index_query": ("index_query", None),
        r"index_query is torch.float32 \[6, 4, 128\], not torch.bfloat16": ("index_query", query.float()),
        r"index_query\[1, 2, 3\] is inf": ("index_query", broken),
        r"index.kv_score is .* not torch.float32 \[395, 512\]": ("index.kv_score", inputs.index.kv_score[:-1]),
        r"window_index\[0, 0\] is": ("window_index", index),
        r"two entries the same slot": ("page_table", table),
        r"row_position\[0\] is 9999": ("row_position", torch.full_like(inputs.row_position, 9999)),
    }


@pytest.mark.parametrize("message", list(mutants()))
def test_a_tensor_that_fails_validation_is_named(tmp_path: Path, message: str) -> None:
    name, tensor = mutants()[message]
    file = tmp_path / "layer.safetensors"
    Capture(case_of(2), generate(case_of(2), 2)).save(file)
    tensors = load_file(file)
    with safe_open(file, framework="pt") as stored:
        facts = stored.metadata()
    del tensors[name]
    if tensor is not None:
        tensors[name] = tensor.contiguous()
    save_file(tensors, file, metadata=facts)
    with pytest.raises(ValueError, match=message):
        load_capture(file)


def test_foreign_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no capture"):
        load_capture(tmp_path)
    (tmp_path / "x.safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="cannot be read as a capture"):
        load_capture(tmp_path)
    save_file({"a": torch.zeros(1)}, tmp_path / "x.safetensors", metadata={"schema": "other"})
    with pytest.raises(ValueError, match="its schema is 'other'"):
        load_capture(tmp_path)


def dump(folder: Path, step: int, name: str, value: object, layer: int | None = None) -> Path:
    """One file as SGLang's dumper writes it: tags in the name, {"value", "meta"} inside."""
    tags = {"step": step, "rank": 0, "dump_index": len(list(folder.glob("*"))) + 1, "name": name}
    tags["recompute_status"] = "disabled"
    if layer is not None:
        tags["layer_id"] = layer
    file = folder / ("___".join(f"{key}={part}" for key, part in tags.items()) + ".pt")
    torch.save({"value": value, "meta": {**tags, "world_rank": 0, "world_size": 1}}, file)
    return file


def dump_step(folder: Path, step: int, spans: list[tuple[int, int, int]], hidden: dict[int, Tensor]) -> None:
    """A forward pass over (slot, start, stop) spans; `hidden` [slot] holds a whole request. Three padding rows."""
    positions = [token for _, start, stop in spans for token in range(start, stop)]
    rows = torch.cat([hidden[slot][start:stop] for slot, start, stop in spans] + [torch.full((3, 256), 7.0).bfloat16()])
    dump(folder, step, "positions", torch.tensor([*positions, 0, 0, 0]))
    dump(folder, step, "seq_lens", torch.tensor([stop for _, _, stop in spans]))
    dump(folder, step, "req_pool_indices", torch.tensor([slot for slot, _, _ in spans]))
    dump(folder, step, "non_intrusive__model.layers.2.self_attn.inputs.0", rows, layer=2)
    dump(folder, step, "non_intrusive__model.layers.2.mlp.inputs.0", rows, layer=2)


@pytest.fixture
def dumped(tmp_path: Path) -> tuple[Path, dict[int, Tensor]]:
    """Two requests in chunks and decode steps, a warm-up before them in the same slot, a prefix hit beside them."""
    folder = tmp_path / "dump"
    folder.mkdir()
    made = torch.Generator().manual_seed(0)
    hidden = {slot: torch.randn(200, 256, generator=made).bfloat16() for slot in (3, 5, 8)}
    dump_step(folder, 1, [(3, 0, 7)], hidden)
    dump_step(folder, 2, [(3, 0, 100), (5, 0, 40)], hidden)
    dump_step(folder, 3, [(5, 40, 90), (3, 100, 150), (8, 64, 80)], hidden)
    dump_step(folder, 4, [(3, 150, 151), (5, 90, 91)], hidden)
    return folder, hidden


def test_requests_are_put_together_over_steps(dumped: tuple[Path, dict[int, Tensor]]) -> None:
    folder, hidden = dumped
    traffic = read_traffic(folder, requests=2)
    assert traffic.lengths == (151, 91)
    assert torch.equal(traffic.hidden[2][0], hidden[3][:151])
    assert torch.equal(traffic.hidden[2][1], hidden[5][:91])
    assert traffic.steps == (
        (Span(0, 0, 100), Span(1, 0, 40)),
        (Span(0, 100, 150), Span(1, 40, 90)),
        (Span(0, 150, 151), Span(1, 90, 91)),
    )


def test_nothing_in_a_dump_is_executed(dumped: tuple[Path, dict[int, Tensor]], tmp_path: Path) -> None:
    folder, _ = dumped
    ran = tmp_path / "ran"

    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str, str]]:
            return open, (str(ran), "w")

    with pytest.raises((ValueError, pickle.PicklingError), match="was not executed"):
        torch.save({"value": Trap(), "meta": {}}, next(folder.glob("step=2*name=positions*")))
        read_traffic(folder)
    assert not ran.exists()


def test_a_missing_step_tensor_is_named(dumped: tuple[Path, dict[int, Tensor]]) -> None:
    folder, _ = dumped
    next(folder.glob("step=3*self_attn*")).unlink()
    with pytest.raises(ValueError, match="layer 2 has 101 of 151 tokens"):
        read_traffic(folder)
    next(folder.glob("step=3*name=seq_lens*")).unlink()
    with pytest.raises(ValueError, match="step 3 has no seq_lens"):
        read_traffic(folder)


def test_an_empty_folder_and_an_absent_layer_are_named(dumped: tuple[Path, dict[int, Tensor]], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no hidden states of layer"):
        read_traffic(dumped[0], layers=(4,))
    with pytest.raises(ValueError, match="holds no dump of rank 1"):
        read_traffic(dumped[0], rank=1)
    with pytest.raises(ValueError, match="holds no dump"):
        read_traffic(tmp_path / "none")


def test_import_makes_a_capture_that_replays(dumped: tuple[Path, dict[int, Tensor]], tmp_path: Path) -> None:
    _files().write_checkpoint(tmp_path / "flash")
    words = [
        "import",
        str(dumped[0]),
        "--weights",
        str(tmp_path / "flash"),
        "--requests",
        "2",
        "--out",
        str(tmp_path / "out"),
    ]
    result = CliRunner().invoke(capture_app, words)
    assert result.exit_code == 0, result.output
    ((case, inputs),) = load_capture(tmp_path / "out")
    assert case.id == "capture:dump-layer-2"
    validate(inputs)
    arrival = [
        next(
            n
            for n, step in enumerate(inputs.steps)
            for span in step
            if span.request == r and span.start <= p < span.stop
        )
        for r, p in zip(inputs.row_request.tolist(), inputs.row_position.tolist(), strict=True)
    ]
    assert arrival == sorted(arrival)
    trace = get_path("oracle").run(inputs, case.id)
    assert trace.value("attention").isfinite().all()
    (kept,) = load_captures(tmp_path / "out")
    traffic = read_traffic(dumped[0], requests=2)
    for request, hidden in enumerate(traffic.hidden[2]):
        assert torch.equal(kept.source[f"hidden/{request}"], hidden)
    without = CliRunner().invoke(capture_app, [*words[:-1], str(tmp_path / "bare"), "--no-keep-hidden"])
    assert without.exit_code == 0 and load_captures(tmp_path / "bare")[0].source == {}


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("hidden/0", (12, 3), r"source.hidden/0 is torch.bfloat16 \[12, 3\], not torch.bfloat16"),
        ("hidden/7", (12, 4096), "source.hidden/7 belongs to no request"),
        ("secret/0", (12, 4096), "source.secret/0 belongs to no request"),
    ],
)
def test_hidden_states_that_do_not_fit_are_named(
    name: str, shape: tuple[int, int], message: str, tmp_path: Path
) -> None:
    source = {name: torch.zeros(shape, dtype=torch.bfloat16)}
    Capture(case_of(2), generate(case_of(2), 2), source=source).save(tmp_path / "layer.safetensors")
    with pytest.raises(ValueError, match=message):
        load_captures(tmp_path)


def test_bad_import_is_one_sentence(tmp_path: Path) -> None:
    result = CliRunner().invoke(capture_app, ["import", str(tmp_path), "--weights", str(tmp_path)])
    assert result.exit_code == 2
    assert "has no config.json" in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_the_window_of_a_row_follows_it(tmp_path: Path) -> None:
    """A capture keeps each row's own window: its last column is the row itself."""
    inputs = generate(case_of(2), 2)
    Capture(case_of(2), replace(inputs)).save(tmp_path / "layer.safetensors")
    got = load_captures(tmp_path)[0].inputs
    own = got.window_index[:, -1]
    assert torch.equal(got.window_position[own], got.row_position)
    assert torch.equal(got.window_request[own], got.row_request)
    assert json.loads((tmp_path / "config.json").read_text())["index_topk"] == 8
