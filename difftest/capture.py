"""Captures: a layer's inputs as a file, to be replayed through every path.

One safetensors file a layer, never pickle. Tensor names are the fields of `LayerInputs` (`index.kv_score`,
`attn_query`), `cache.NAME` for raw cache bytes, or `source.NAME` for the hidden states and query latents that the
inputs were made from (`source.hidden/0`, `source.q_latent/0`: a tensor a request); the metadata holds the schema, the
case as JSON, the model's constants and the steps. The folder also holds the model's `config.json`, which the replayed
case names as its model.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .cases.case import Case
from .reference.config import ModelConfig
from .reference.inputs import CompressorInputs, LayerInputs, Span
from .weights import finite

SCHEMA = "difftest.capture/1"
SPEC = "capture:"
SUFFIX = ".safetensors"
COMPRESSORS = ("index", "main")
CACHE, SOURCE = "cache.", "source."
HIDDEN, Q_LATENT = "hidden", "q_latent"
CONFIG_FILE = "config.json"


@dataclass(frozen=True)
class Capture:
    """A layer's inputs with where they come from.

    cache    raw bytes (uint8) by name, for whoever wants them.
    source   what the inputs were made from, by `hidden/REQUEST` [length, hidden_size] and `q_latent/REQUEST` [length,
             q_lora_rank], bf16: with other weights the inputs can be made again. Empty when it was not kept.
    """

    case: Case
    inputs: LayerInputs
    origin: str = ""
    cache: dict[str, Tensor] = field(default_factory=dict)
    source: dict[str, Tensor] = field(default_factory=dict)

    def save(self, file: Path) -> None:
        """Writes the file; a half-written one never replaces a whole one."""
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in input_tensors(self.inputs).items()}
        tensors |= {CACHE + name: raw.cpu().contiguous() for name, raw in self.cache.items()}
        tensors |= {SOURCE + name: tensor.cpu().contiguous() for name, tensor in self.source.items()}
        inputs = self.inputs
        facts = {
            "schema": SCHEMA,
            "case": self.case.to_json(),
            "origin": self.origin,
            "config": json.dumps(asdict(inputs.config)),
            "layer": str(inputs.layer),
            "lengths": json.dumps(inputs.lengths),
            "prefix_entries": json.dumps(inputs.prefix_entries),
            "steps": json.dumps([[asdict(span) for span in step] for step in inputs.steps]),
            "num_pages": str(inputs.num_pages),
            "page_size": str(inputs.page_size),
        }
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(".part")
        save_file(tensors, part, metadata=facts)
        part.replace(file)
        (file.parent / CONFIG_FILE).write_text(json.dumps(config_to_dict(inputs.config), indent=1) + "\n")


def config_to_dict(config: ModelConfig) -> dict[str, Any]:
    """The constants in the form of a DeepSeek `config.json`, as `config_from_dict` reads it."""
    plain = {name: value for name, value in asdict(config).items() if not name.startswith("rope_")}
    scaling = {
        "factor": config.rope_factor,
        "original_max_position_embeddings": config.rope_original_max_position,
        "beta_fast": config.rope_beta_fast,
        "beta_slow": config.rope_beta_slow,
    }
    return {**plain, "rope_theta": config.rope_theta, "rope_scaling": scaling}


def source_tensors(hidden: Sequence[Tensor], q_latent: Sequence[Tensor] | None = None) -> dict[str, Tensor]:
    """`Capture.source` of a layer, from a tensor a request."""
    found = {f"{HIDDEN}/{request}": tensor for request, tensor in enumerate(hidden)}
    return found | {f"{Q_LATENT}/{request}": tensor for request, tensor in enumerate(q_latent or ())}


def input_tensors(inputs: LayerInputs) -> dict[str, Tensor]:
    """Every tensor of the inputs by its dotted name."""
    found: dict[str, Tensor] = {}
    for part in fields(inputs):
        value = getattr(inputs, part.name)
        if isinstance(value, CompressorInputs):
            found |= {f"{part.name}.{inner.name}": getattr(value, inner.name) for inner in fields(value)}
        elif isinstance(value, Tensor):
            found[part.name] = value
    return found


def load_file(file: Path) -> Capture:
    """Reads one capture. ValueError names the file, and the tensor that is missing, misshapen or not finite."""
    try:
        with safe_open(file, framework="pt") as stored:
            facts = stored.metadata() or {}
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118  not a mapping
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} cannot be read as a capture: {error}") from error
    if facts.get("schema") != SCHEMA:
        raise ValueError(f"{file} is no capture: its schema is {facts.get('schema')!r}, this version reads {SCHEMA!r}")
    try:
        inputs = _inputs(facts, tensors)
        source = _source(inputs, tensors)
        case = replace(Case.from_json(facts["case"]), model=str(file.parent / CONFIG_FILE), overrides={})
    except (KeyError, TypeError, ValueError) as error:
        detail = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{file} is no whole capture: {detail}; capture the layer again") from error
    cache = {name.removeprefix(CACHE): raw for name, raw in tensors.items() if name.startswith(CACHE)}
    return Capture(case, inputs, facts.get("origin", ""), cache, source)


def _source(inputs: LayerInputs, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The `source.` tensors, checked against the requests and the config."""
    widths = {HIDDEN: inputs.config.hidden_size, Q_LATENT: inputs.config.q_lora_rank}
    found = {name.removeprefix(SOURCE): tensor for name, tensor in tensors.items() if name.startswith(SOURCE)}
    for name, tensor in found.items():
        kind, _, request = name.partition("/")
        if kind not in widths or not request.isdigit() or int(request) >= len(inputs.lengths):
            raise ValueError(f"{SOURCE}{name} belongs to no request: it has {len(inputs.lengths)}")
        shape = (inputs.lengths[int(request)], widths[kind])
        if tensor.dtype != torch.bfloat16 or tuple(tensor.shape) != shape:
            raise ValueError(f"{SOURCE}{name} is {tensor.dtype} {list(tensor.shape)}, not torch.bfloat16 {list(shape)}")
        finite(SOURCE + name, tensor)
    return found


def _inputs(facts: dict[str, str], tensors: dict[str, Tensor]) -> LayerInputs:
    raw = json.loads(facts["config"])
    config = ModelConfig(**{**raw, "compress_ratios": tuple(raw["compress_ratios"])})
    layer = int(facts["layer"])
    named: dict[str, Any] = {
        "config": config,
        "layer": layer,
        "kind": config.kind(layer),
        "lengths": tuple(json.loads(facts["lengths"])),
        "prefix_entries": tuple(json.loads(facts["prefix_entries"])),
        "steps": tuple(tuple(Span(**span) for span in step) for step in json.loads(facts["steps"])),
        "num_pages": int(facts["num_pages"]),
        "page_size": int(facts["page_size"]),
    }
    for name in COMPRESSORS:
        parts = [part.name for part in fields(CompressorInputs)]
        present = f"{name}.kv_score" in tensors
        named[name] = CompressorInputs(*(tensors[f"{name}.{part}"] for part in parts)) if present else None
    for part in fields(LayerInputs):
        if part.name not in named:
            optional = part.name in ("index_query", "index_weight")
            named[part.name] = tensors.get(part.name) if optional else tensors[part.name]
    inputs = LayerInputs(**named)
    validate(inputs)
    return inputs


def validate(inputs: LayerInputs) -> None:
    """ValueError naming the first tensor whose presence, dtype, shape or range is not what `LayerInputs` states."""
    found, wanted = input_tensors(inputs), expected_shapes(inputs)
    for name in [*wanted, *found]:
        if name not in found:
            raise ValueError(f"a {inputs.kind} layer needs tensor {name}")
        if name not in wanted:
            raise ValueError(f"a {inputs.kind} layer has no tensor {name}")
        dtype, shape = wanted[name]
        if found[name].dtype != dtype or tuple(found[name].shape) != shape:
            have = f"{found[name].dtype} {list(found[name].shape)}"
            raise ValueError(f"{name} is {have}, not {dtype} {list(shape)}")
        finite(name, found[name])
    requests = len(inputs.lengths)
    _within("row_request", inputs.row_request, 0, requests)
    limits = torch.tensor(inputs.lengths)
    _within("row_position", inputs.row_position, 0, limits[inputs.row_request])
    _within("window_request", inputs.window_request, 0, requests)
    _within("window_position", inputs.window_position, 0, limits[inputs.window_request])
    _within("window_index", inputs.window_index, -1, len(inputs.window_request))
    _within("page_table", inputs.page_table, -1, inputs.num_pages)
    slots = inputs.entry_slot if inputs.ratio else torch.empty(0)
    if (slots < 0).any() or len(torch.unique(slots)) != len(slots):
        raise ValueError("page_table gives two entries the same slot, or an entry none")


def _within(name: str, tensor: Tensor, low: int, high: int | Tensor) -> None:
    bad = (tensor < low) | (tensor >= high)
    if bad.any():
        where = bad.nonzero()[0].tolist()
        raise ValueError(f"{name}{where} is {int(tensor[tuple(where)])}, out of range")


def expected_shapes(inputs: LayerInputs) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """dtype and shape of every tensor of a layer of this kind, from its lengths, rows and config."""
    config, rows, window = inputs.config, len(inputs.row_request), len(inputs.window_request)
    bf16, fp32, int64 = torch.bfloat16, torch.float32, torch.int64
    heads, width = config.num_attention_heads, config.head_dim
    wanted: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        "row_request": (int64, (rows,)),
        "row_position": (int64, (rows,)),
        "window_kv": (bf16, (window, width)),
        "window_request": (int64, (window,)),
        "window_position": (int64, (window,)),
        "window_index": (int64, (rows, config.sliding_window)),
        "kv_norm_weight": (fp32, (width,)),
        "attn_query": (bf16, (rows, heads, width)),
        "attn_sink": (fp32, (heads,)),
        "page_table": (int64, (len(inputs.lengths), inputs.page_table.shape[-1])),
    }
    if inputs.kind == "csa":
        wanted["index_query"] = (bf16, (rows, config.index_n_heads, config.index_head_dim))
        wanted["index_weight"] = (bf16, (rows, config.index_n_heads))
        wanted |= _compressor_shapes("index", inputs, config.index_head_dim)
    if inputs.kind != "swa":
        wanted |= _compressor_shapes("main", inputs, width)
    return wanted


def _compressor_shapes(name: str, inputs: LayerInputs, dim: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    halves, tokens = (2 if inputs.ratio == 4 else 1), inputs.token_offset[-1]
    shapes = {
        "kv_score": (tokens, 2 * halves * dim),
        "ape": (halves * inputs.ratio, dim),
        "norm_weight": (dim,),
        "pooled_prefix": (sum(inputs.prefix_entries), dim),
    }
    return {f"{name}.{part}": (torch.float32, shape) for part, shape in shapes.items()}


def load_capture(path: str | Path) -> list[tuple[Case, LayerInputs]]:
    """(case, inputs) of a capture file, or of every capture in a folder; a command line names either `capture:PATH`.

    Cases are named `capture:NAME` after the file. ValueError when the path holds no capture or one fails validation.
    """
    place = Path(str(path).removeprefix(SPEC))
    return [(capture.case, capture.inputs) for capture in load_captures(place)]


def load_captures(place: Path) -> list[Capture]:
    files = sorted(place.glob(f"*{SUFFIX}")) if place.is_dir() else [place]
    if not files or not all(file.is_file() for file in files):
        raise ValueError(
            f"{place} holds no capture; give a file or a folder written by `difftest capture` or `weights`"
        )
    return [load_file(file) for file in files]


def capture_file(folder: Path, layer: int) -> Path:
    return folder / f"layer-{layer:02d}{SUFFIX}"


def captured_case(name: str, lengths: Sequence[int], layer: int, model: str, rows: int) -> Case:
    """The case of captured or checkpoint data: its id is `capture:NAME`; only its rows and pages are drawn."""
    says = "captured inputs; not generated from a recipe"
    return Case(
        SPEC + name, "gaussian", tuple(lengths), rows=rows, layers=(layer,), model=model, profiles=(), says=says
    )
