"""A case: a small, printable recipe that generates a layer's inputs. Never the tensors themselves."""

import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

from ..reference.config import ModelConfig, load_config
from ..reference.inputs import Span, Step

Mode = Literal["prefill", "chunked", "decode", "resume"]
Profile = Literal["smoke", "default", "full", "gpu"]


@dataclass(frozen=True)
class Case:
    """The recipe of one case.

    id             names it everywhere; the seed comes from it, so reordering and sharding never change data.
    family         generator in `cases/families.py`; params are its parameters.
    lengths        tokens of each request.
    mode           prefill: one step. chunked: steps of `chunk` tokens. decode: all but the last `decode_tokens` in one
                   step, then one token a step. resume: the first `chunk` tokens in one step (as another request's
                   prefix hit would have left them), the rest in a second.
    rows           query tokens compared in all; 0 compares every one. In decode mode the decoded tokens are the rows.
    layers         layers that run by default, each with its own weights and data.
    brief          how many of them the smoke and default profiles run; full and gpu run all.
    pooled_prefix  entries at the start of each request that are given pooled, for histories too long to pool.
    spare_pages    pages of the pool that no request owns; they hold poison.
    memory_share   share of a GPU's memory that a path may take beyond the inputs: what a serving process leaves free.
    model          shipped config or path of a config.json; `overrides` replaces single values (a shrunk case uses it).
    profiles       which profiles run it.   says: what it is for, in a line.
    """

    id: str
    family: str
    lengths: tuple[int, ...]
    mode: Mode = "prefill"
    chunk: int = 2049
    decode_tokens: int = 8
    rows: int = 32
    layers: tuple[int, ...] = (2, 14, 28, 42)
    brief: int = 1
    pooled_prefix: int = 0
    shuffled_pages: bool = True
    spare_pages: int = 5
    memory_share: float = 0.2
    params: dict[str, Any] = field(default_factory=dict)
    model: str = "v4-flash"
    overrides: dict[str, Any] = field(default_factory=dict)
    profiles: tuple[Profile, ...] = ("default", "full", "gpu")
    base_seed: int = 0
    says: str = ""

    @property
    def config(self) -> ModelConfig:
        return replace(load_config(self.model), **self.overrides)

    @property
    def selection_note(self) -> str:
        """Empty when some row sees more than index_topk entries; otherwise why no selection can be wrong here."""
        kinds, k = [self.config.kind(layer) for layer in self.layers], self.config.index_topk
        if "csa" not in kinds:
            return f"no selection in {kinds[0]} layers"
        seen = max(self.lengths) // self.config.compress_ratios[self.layers[kinds.index("csa")]]
        return "" if seen > k else f"selection not exercised: at most {seen} of {k} entries visible"

    def seed(self, layer: int) -> int:
        """63-bit seed: base + sha256(id and layer)."""
        digest = hashlib.sha256(f"{self.id}/layer{layer}".encode()).digest()
        return (self.base_seed + int.from_bytes(digest[:8], "big")) % (1 << 63)

    def steps(self) -> tuple[Step, ...]:
        """Steps in which tokens arrive; a request that has run out of tokens is left out of later steps."""
        cuts = [self._cuts(length) for length in self.lengths]
        return tuple(
            tuple(Span(request, *cut[number]) for request, cut in enumerate(cuts) if number < len(cut))
            for number in range(max(map(len, cuts)))
        )

    def prefix_tokens(self, length: int) -> int:
        """Tokens of a request of `length` that are given as pooled entries; 0 if it has no more tokens than those."""
        tokens = self.pooled_prefix * 4
        return tokens if tokens < length else 0

    def _cuts(self, length: int) -> list[tuple[int, int]]:
        start = self.prefix_tokens(length)
        if self.mode == "prefill":
            edges = [start, length]
        elif self.mode == "chunked":
            edges = [*range(start, length, self.chunk), length]
        elif self.mode == "decode":
            edges = [start, *range(max(start + 1, length - self.decode_tokens), length + 1)]
        else:
            edges = [start, max(start, min(self.chunk, length)), length]
        edges = sorted(set(edges))
        return list(pairwise(edges))

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "Case":
        raw = json.loads(text)
        unknown = set(raw) - set(cls.__dataclass_fields__)
        if unknown:
            raise ValueError(
                f"a case has no field {', '.join(sorted(unknown))}; fields are {', '.join(cls.__dataclass_fields__)}"
            )
        for name in ("lengths", "layers", "profiles"):
            if name in raw:
                raw[name] = tuple(raw[name])
        return cls(**raw)
