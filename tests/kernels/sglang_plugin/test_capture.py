"""Capture: what a step's layer reads comes back as a capture file, bounded, and never from a graph."""

import enum
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from difftest.kernels.sglang_plugin import capture, record
from difftest.kernels.sglang_plugin.flags import CaptureFlags
from torch import Tensor, nn

from difftest.capture import load_file

from .conftest import add_module

HIDDEN, RANK, HEADS, WIDTH, INDEX_HEADS, DIM, WINDOW = 32, 16, 2, 512, 4, 128, 128
LENGTHS = (301, 37)
MODEL = SimpleNamespace(
    hidden_size=HIDDEN,
    num_hidden_layers=3,
    head_dim=WIDTH,
    qk_rope_head_dim=64,
    q_lora_rank=RANK,
    index_n_heads=INDEX_HEADS,
    index_head_dim=DIM,
    index_topk=512,
    sliding_window=WINDOW,
    rope_theta=10000.0,
    compress_rope_theta=160000.0,
    max_position_embeddings=4096,
    rms_norm_eps=1e-6,
    compress_ratios=[0, 4, 128],
    rope_scaling={"factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1},
)


class ForwardMode(enum.Enum):
    EXTEND = "extend"
    DECODE = "decode"


class Linear(nn.Module):
    """As SGLang's: returns (output, bias)."""

    def __init__(self, columns: int, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, columns, dtype=torch.bfloat16), requires_grad=False)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return x @ self.weight.T, None


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width), requires_grad=False)


class Compressor(nn.Module):
    def __init__(self, ratio: int, width: int) -> None:
        super().__init__()
        halves = 2 if ratio == 4 else 1
        self.head_dim, self.norm = width, Norm(width)
        self.ape = torch.randn(ratio, halves * width)
        self.gate = torch.randn(HIDDEN, 2 * halves * width)

    def compute_kv_score(self, x: Tensor, batch: object) -> Tensor:
        return x.float() @ self.gate


class Indexer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq_b, self.weights_proj = Linear(RANK, INDEX_HEADS * DIM), Linear(HIDDEN, INDEX_HEADS)
        self.compressor = Compressor(4, DIM)


class Layer(nn.Module):
    """As SGLang's `MQALayer`, as far as a capture looks."""

    def __init__(self, layer_id: int, ratio: int) -> None:
        super().__init__()
        self.layer_id, self.compress_ratio, self.fuse_wqa_wkv = layer_id, ratio, True
        self.q_lora_rank, self.n_local_heads, self.head_dim = RANK, HEADS, WIDTH
        self.wqkv_a, self.wq_b = Linear(HIDDEN, RANK + WIDTH), Linear(RANK, HEADS * WIDTH)
        self.kv_norm, self.sink = Norm(WIDTH), torch.randn(64)
        self.compressor = Compressor(ratio, WIDTH) if ratio else None
        self.indexer = Indexer() if ratio == 4 else None

    def _local_attn_sink(self, heads: int | None = None) -> Tensor:
        return self.sink

    def _forward_prepare(self, x: Tensor, positions: Tensor, batch: object, attn_backend: object) -> str:
        lora = self.wqkv_a(x)[0][:, :RANK]
        self.wq_b(lora)[0].zero_()  # rotated in place, say
        if self.indexer is not None:
            self.indexer.weights_proj(x)
            self.indexer.wq_b(lora)
            self.indexer.compressor.compute_kv_score(x, batch)
        if self.compressor is not None:
            self.compressor.compute_kv_score(x, batch)
        return "prepared"


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A backend and its steps, outside any graph."""
    state = SimpleNamespace(captures=False)
    runner = "sglang.srt.model_executor"
    add_module(monkeypatch, f"{runner}.forward_batch_info", {"ForwardMode": ForwardMode})
    graphs = f"{runner}.runner_backend_utils"
    add_module(
        monkeypatch, f"{graphs}.breakable_cuda_graph.context", {"is_in_breakable_cuda_graph": lambda: state.captures}
    )
    add_module(monkeypatch, f"{graphs}.tc_piecewise_cuda_graph", {"is_in_tc_piecewise_cuda_graph": lambda: False})
    add_module(monkeypatch, f"{runner}.runner_utils.capture_mode", {"get_is_capture_mode": lambda: False})
    table = torch.tensor([[907, 11, 640], [55, 3, 2]])[torch.tensor([0] * LENGTHS[0] + [1] * LENGTHS[1])]
    state.backend = SimpleNamespace(
        model_runner=SimpleNamespace(model_config=SimpleNamespace(hf_text_config=MODEL)),
        forward_metadata=SimpleNamespace(core_metadata=SimpleNamespace(page_table=table)),
    )
    yield state
    capture.stop()


def batch(lengths: tuple[int, ...] = LENGTHS, prefixes: tuple[int, ...] | None = None) -> SimpleNamespace:
    return SimpleNamespace(
        forward_mode=ForwardMode.EXTEND,
        extend_seq_lens_cpu=list(lengths),
        extend_prefix_lens_cpu=list(prefixes or [0] * len(lengths)),
    )


def step(running: SimpleNamespace, layers: list[Layer], given: SimpleNamespace, x: Tensor) -> None:
    for layer in layers:
        prepared = capture.around_layer(Layer._forward_prepare, layer, x, torch.arange(len(x)), given, running.backend)
        assert prepared == "prepared"


def tokens() -> Tensor:
    return torch.randn(sum(LENGTHS), HIDDEN, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)


def files(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.rglob("*.safetensors"))


def test_a_captured_layer_holds_what_the_layer_read(running, tmp_path: Path) -> None:
    capture.start(CaptureFlags(tmp_path, layers=(1, 2), rows=20))
    layers, x = [Layer(0, 0), Layer(1, 4), Layer(2, 128)], tokens()
    step(running, layers, batch(), x)
    capture.stop()
    assert files(tmp_path) == ["step-0000-layer-01.safetensors", "step-0000-layer-02.safetensors"]
    inputs = load_file(next(tmp_path.rglob("*layer-01*"))).inputs
    layer = layers[1]
    assert inputs.lengths == LENGTHS and inputs.kind == "csa" and inputs.config.num_attention_heads == HEADS
    rows = [*range(291, 301), *range(LENGTHS[0] + 27, LENGTHS[0] + 37)]
    lora = layer.wqkv_a(x)[0]
    assert torch.equal(inputs.index.kv_score, layer.indexer.compressor.compute_kv_score(x, None))
    assert torch.equal(inputs.main.kv_score, layer.compressor.compute_kv_score(x, None))
    assert torch.equal(inputs.index_query.flatten(1), layer.indexer.wq_b(lora[:, :RANK])[0][rows])
    assert torch.equal(inputs.index_weight, layer.indexer.weights_proj(x)[0][rows])
    assert torch.equal(inputs.attn_query.flatten(1), layer.wq_b(lora[:, :RANK])[0][rows])
    assert torch.equal(inputs.attn_sink, layer.sink[:HEADS])
    latest = inputs.window_index[:, -1]
    assert torch.equal(inputs.window_kv[latest], lora[rows, RANK:])
    assert inputs.window_position[latest].tolist() == inputs.row_position.tolist() == [*range(291, 301), *range(27, 37)]
    assert inputs.page_table.tolist() == [[3, 1], [2, -1]], "pages keep their order and lose their numbers"
    assert "compute_kv_score" not in vars(layer.compressor) and not layer.wq_b._forward_hooks


def test_without_a_choice_the_first_indexer_of_the_first_step_is_captured(running, tmp_path: Path) -> None:
    capture.start(CaptureFlags(tmp_path))
    layers, x = [Layer(0, 0), Layer(1, 4), Layer(2, 4)], tokens()
    step(running, layers, batch(), x)
    step(running, layers, batch(), x)
    capture.stop()
    assert files(tmp_path) == ["step-0000-layer-01.safetensors"]


def test_requests_with_a_prefix_decode_steps_and_graphs_are_left_out(running, tmp_path: Path) -> None:
    capture.start(CaptureFlags(tmp_path, layers=(1,), steps=(0, 1, 2, 3)))
    layers, x = [Layer(1, 4)], tokens()
    step(running, layers, batch(prefixes=(256, 512)), x)
    decode = batch()
    decode.forward_mode = ForwardMode.DECODE
    step(running, layers, decode, x)
    running.captures = True
    step(running, layers, batch(), x)
    running.captures = False
    assert capture.whole_requests(batch(prefixes=(256, 0))) == [(LENGTHS[0], LENGTHS[1])]
    step(running, layers, batch(prefixes=(256, 0)), x)
    capture.stop()
    (name,) = files(tmp_path)
    assert load_file(next(tmp_path.rglob(name))).inputs.lengths == (LENGTHS[1],)


def test_the_limit_on_bytes_holds(running, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    capture.start(CaptureFlags(tmp_path, layers=(1,), bytes=1000))
    step(running, [Layer(1, 4)], batch(), tokens())
    capture.stop()
    assert files(tmp_path) == [] and "DIFFTEST_CAPTURE_BYTES are left: not captured" in caplog.text


def test_a_failed_capture_is_named_and_serving_goes_on(
    running, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture.start(CaptureFlags(tmp_path, layers=(1,), steps=(0, 1)))
    monkeypatch.setattr(record, "constants", lambda *_: {}["missing"])
    step(running, [Layer(1, 4)], batch(), tokens())
    assert "difftest.kernels.sglang_plugin: the capture of layer 1 failed and has ended: 'missing'" in caplog.text
    step(running, [Layer(1, 4)], batch(), tokens())
    assert files(tmp_path) == []


def test_rotary_constants_are_read_from_either_place_where_transformers_keeps_them() -> None:
    older = vars(MODEL)
    newer = {name: value for name, value in older.items() if name not in ("rope_theta", "rope_scaling")}
    newer["rope_parameters"] = {"rope_theta": 20000.0, **MODEL.rope_scaling}
    assert record.constants(SimpleNamespace(**newer), HEADS) == record.constants(MODEL, HEADS) | {"rope_theta": 20000.0}


def test_every_rank_has_its_own_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
    assert capture.rank_name() == "rank-3"
