"""Worlds of the in-process needle sweep: one long sequence, and one question with its own needle a length and depth.

A row at position L - 1 sees the first L // 4 entries, so one sequence of keys serves every length by being cut, and
every path runs once for all lengths and depths. Each row has its own question and its own needle; the needles of other
rows are ordinary entries to it.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..cases.case import Case
from ..cases.draw import Draw
from ..cases.families import apply_family
from ..cases.generate import APE_STD, NORM_STD, POOLED_STD
from ..cases.needle import needle_entries
from ..cases.rows import PAGE_SIZE, window_of
from ..reference.attention import latent
from ..reference.chunks import slices
from ..reference.config import ModelConfig
from ..reference.inputs import CompressorInputs, LayerInputs
from ..reference.rope import rope_table
from .sweep_needle import plant_keys, plant_latents

SEQUENCE = 32768
"""Lengths up to this share one sequence whose keys are pooled from tokens; every longer length has its own, whose
entries are given pooled but for the last TAIL: a million tokens of gates and values would be 2 GiB."""
TAIL = 64
CHUNK = 2047
"""Tokens of a prefill step: no multiple of 4, so that windows straddle steps."""
SPARE_PAGES = 5
CHUNK_BYTES = 2**26

DISTRACTORS = {
    "gaussian": "independent Gaussian keys, the needle 6 standard deviations above their mean score",
    "near-duplicate": "copies of one text, a third of fp8's rounding error apart; the needle is the best copy",
    "heavy-tailed": "Student-t values with 3 degrees of freedom in keys, gates, queries and weights",
    "outlier-heavy": "4 channels 24 times as large as the rest, as trained models have them",
    "adversarial": "Gaussian keys, the needle 1/64 to 1/4 of fp8's error bound above the cut",
}
"""Distractor models, from easy to hard."""

BACKGROUND: dict[str, tuple[str, dict[str, float]]] = {
    "gaussian": ("gaussian", {}),
    "near-duplicate": ("near-duplicate", {"clusters": 1, "spread": 2.0**-7}),
    "heavy-tailed": ("heavy-tailed", {}),
    "outlier-heavy": ("outlier-heavy", {}),
    "adversarial": ("gaussian", {}),
}
"""Family and parameters of everything but the needles."""


@dataclass(frozen=True)
class WorldSpec:
    """The recipe of a world. Equal recipes make equal tensors.

    lengths   prompt lengths, ascending; depths: shares of a row's visible entries at which its needle lies.
    """

    distractor: str
    layer: int
    seed: int
    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    model: str = "v4-flash"

    @property
    def id(self) -> str:
        return f"sweep/{self.distractor}/layer{self.layer}/seed{self.seed}/{self.lengths[0]}-{self.lengths[-1]}"

    def case(self) -> Case:
        """A case with this world's sequence: its steps and seed are used, its rows are not."""
        longest = self.lengths[-1]
        given = longest // 4 - TAIL if longest > SEQUENCE else 0
        return Case(
            self.id,
            "gaussian",
            (longest,),
            mode="chunked",
            chunk=CHUNK,
            rows=1,
            layers=(self.layer,),
            model=self.model,
            pooled_prefix=given,
        )


@dataclass(frozen=True)
class World:
    """A layer's inputs with a row a (length, depth), each row's needle, and what attention reads.

    entry     [R] int64, the needle of each row.
    latents   [E, C] fp32, the compressed latent of every entry; window [W, C] fp32 those of the rows' windows.
    """

    spec: WorldSpec
    inputs: LayerInputs
    entry: Tensor
    latents: Tensor
    window: Tensor

    @property
    def cells(self) -> list[tuple[int, float]]:
        """Length and depth of every row."""
        return [(length, depth) for length in self.spec.lengths for depth in self.spec.depths]

    def to(self, device: str) -> "World":
        return World(
            self.spec,
            self.inputs.to(device),
            self.entry.to(device),
            self.latents.to(device),
            self.window.to(device),
        )


def groups(lengths: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The lengths that share a world, ascending."""
    ordered = sorted(set(lengths))
    short = tuple(length for length in ordered if length <= SEQUENCE)
    return ([short] if short else []) + [(length,) for length in ordered if length > SEQUENCE]


def make_world(spec: WorldSpec) -> World:
    """Draws a world on the CPU. ValueError for an unknown distractor or a layer without an indexer."""
    if spec.distractor not in BACKGROUND:
        raise ValueError(f"unknown distractor model {spec.distractor!r}: choose from {', '.join(DISTRACTORS)}")
    draw = Draw(spec.case().seed(spec.layer))
    inputs = _plain(spec, draw)
    family, params = BACKGROUND[spec.distractor]
    inputs = apply_family(family, inputs, draw, params)
    entry = needle_entries(inputs, spec.depths)
    if bool((entry < 0).any()):
        raise ValueError(f"{spec.lengths[0]} tokens hold fewer entries than there are depths; give longer lengths")
    plant_keys(inputs, draw, entry, spec.distractor)
    config = inputs.config
    weight = 1 + NORM_STD * draw.normal("main.norm_weight", config.head_dim)
    pooled = draw.normal("main.pooled", inputs.entries[0], config.head_dim).mul_(POOLED_STD)
    latents = _latents(inputs, pooled, weight, inputs.entry_position)
    plant_latents(inputs, entry, latents)
    window = _latents(inputs, inputs.window_kv, inputs.kv_norm_weight, inputs.window_position)
    return World(spec, inputs, entry, latents, window)


def _plain(spec: WorldSpec, draw: Draw) -> LayerInputs:
    """Unit-variance Gaussian inputs without a main compressor, a row a (length, depth)."""
    case, config = spec.case(), spec.case().config
    kind = config.kind(spec.layer)
    if kind != "csa":
        raise ValueError(f"layer {spec.layer} is {kind} and has no indexer; csa layers are {_some(config)}")
    longest = spec.lengths[-1]
    given = case.prefix_tokens(longest) // 4
    position = torch.tensor(spec.lengths).repeat_interleave(len(spec.depths)) - 1
    rows, request = len(position), torch.zeros_like(position)
    window_request, window_position, window_index = window_of(request, position, config.sliding_window)
    tokens = longest - max(0, given * 4 - 4)
    pages = -(-(longest // 4) // PAGE_SIZE)
    dim = config.index_head_dim
    bf16 = torch.bfloat16
    return LayerInputs(
        config=config,
        kind=kind,
        layer=spec.layer,
        lengths=(longest,),
        prefix_entries=(given,),
        steps=case.steps(),
        row_request=request,
        row_position=position,
        index=CompressorInputs(
            kv_score=draw.normal("index.kv_score", tokens, 4 * dim),
            ape=draw.normal("index.ape", 8, dim).mul_(APE_STD),
            norm_weight=1 + NORM_STD * draw.normal("index.norm_weight", dim),
            pooled_prefix=draw.normal("index.pooled_prefix", given, dim).mul_(POOLED_STD),
        ),
        index_query=draw.normal("index_query", rows, config.index_n_heads, dim, dtype=bf16),
        index_weight=draw.normal("index_weight", rows, config.index_n_heads, dtype=bf16),
        main=None,
        window_kv=draw.normal("window_kv", len(window_position), config.head_dim, dtype=bf16),
        window_request=window_request,
        window_position=window_position,
        window_index=window_index,
        kv_norm_weight=(1 + NORM_STD * draw.normal("kv_norm_weight", config.head_dim)).to(bf16).float(),
        attn_query=draw.normal("attn_query", rows, config.num_attention_heads, config.head_dim, dtype=bf16),
        attn_sink=draw.normal("attn_sink", config.num_attention_heads),
        page_table=draw.permutation("page_table", pages + SPARE_PAGES - 1)[:pages][None] + 1,
        num_pages=pages + SPARE_PAGES,
        page_size=PAGE_SIZE,
    )


def _some(config: ModelConfig) -> str:
    layers = config.layers("csa")
    return f"{', '.join(map(str, layers[:3]))} to {layers[-1]}"


def _latents(inputs: LayerInputs, source: Tensor, weight: Tensor, position: Tensor) -> Tensor:
    """Latents [n, C] fp32 of pooled values or window tokens [n, C], made in fp64 piece by piece."""
    made = torch.empty(source.shape)
    for part in slices(len(source), 10 * 8 * source.shape[1], CHUNK_BYTES):
        table = rope_table(inputs.config, inputs.kind, position[part])
        made[part] = latent(source[part], weight, inputs.config.rms_norm_eps, table)
    return made


def with_topk(world: World, k: int) -> World:
    """The same world with another index_topk."""
    return replace(world, inputs=replace(world.inputs, config=replace(world.inputs.config, index_topk=k)))
