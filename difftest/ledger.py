"""The ledger of known differences between Hugging Face transformers and DeepSeek's published arithmetic.

Every difference is measured, not believed: one that has grown or vanished fails, and so does a new one, because what is
left of a stage once its known differences are taken out must be fp32 noise (the `structure-*` entries).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from .cases.case import Case
from .cases.generate import generate
from .paths.base import get_path
from .paths.transformers_adapter import Transformers
from .reference.inputs import CompressorInputs, LayerInputs
from .stages import StageName
from .trace import Trace

CASE = Case(
    "ledger-700",
    "gaussian",
    (700, 301),
    mode="chunked",
    chunk=257,
    rows=12,
    overrides={"index_topk": 64},
    says="small enough to run in a test; 175 entries, 64 selected",
)
LAYER = 2
FP32_NOISE = 1e-6
"""Relative rms that fp32 leaves in a sum of 512 terms: 512^0.5 roundings of rms 2^-24 / 3^0.5, 7.8e-7, rounded up."""


class Bench:
    """The runs that the entries measure on, each made once: both dtypes of transformers, the oracle and DeepSeek's."""

    def __init__(self, case: Case = CASE, layer: int = LAYER) -> None:
        self.case = case
        self.inputs = generate(case, layer)
        self.coarse = bf16_inputs(self.inputs)

    def _run(self, path: str, inputs: LayerInputs) -> Trace:
        return get_path(path).run(inputs, self.case.id)

    @cached_property
    def oracle(self) -> Trace:
        return self._run("oracle", self.inputs)

    @cached_property
    def deepseek(self) -> Trace:
        return self._run("deepseek", self.inputs)

    @cached_property
    def fp32(self) -> Trace:
        return self._run("transformers", self.inputs)

    @cached_property
    def bf16(self) -> Trace:
        return self._run("transformers:dtype=bf16", self.inputs)

    @cached_property
    def fp32_coarse(self) -> Trace:
        """fp32 modules on compressor inputs that are already bf16: what is left to the module's own roundings."""
        return self._run("transformers", self.coarse)

    def stage(
        self, stage: StageName, upstream: Trace, dtype: str = "fp32", hadamard: str = "added", tensor: str = "value"
    ) -> Tensor:
        """One tensor of one stage of transformers, on another run's upstream tensors."""
        return Transformers(dtype, hadamard).stage(stage, self.inputs, upstream)[tensor]


def bf16_inputs(inputs: LayerInputs) -> LayerInputs:
    """The same inputs with the compressors' GEMM outputs rounded to bf16."""

    def rounded(part: CompressorInputs | None) -> CompressorInputs | None:
        return part and replace(part, kv_score=part.kv_score.to(torch.bfloat16).float())

    return replace(inputs, index=rounded(inputs.index), main=rounded(inputs.main))


def relative(got: Tensor, want: Tensor) -> float:
    """Root mean square of the difference over that of `want`, over the elements that are finite in `want`."""
    finite = want.isfinite()
    got, want = got.double()[finite], want.double()[finite]
    return float((got - want).norm() / want.norm())


@dataclass(frozen=True)
class Entry:
    """One known difference: what transformers does, what the published code does, and the size measured.

    measured   the size found with transformers 5.24.0 on the ledger's own case.
    slack      factor by which another version may differ and still be the same difference; 0: exactly `measured`.
    """

    name: str
    stage: StageName
    says: str
    measure: Callable[[Bench], float]
    measured: float
    slack: float = 1.25


@dataclass(frozen=True)
class Outcome:
    """What an entry measures today: `as known`, `vanished` (below its range), or `grown` (above it)."""

    entry: Entry
    size: float

    @property
    def state(self) -> str:
        low, high = bounds(self.entry)
        return "vanished" if self.size < low else "as known" if self.size <= high else "grown"

    def __str__(self) -> str:
        low, high = bounds(self.entry)
        entry = self.entry
        return f"{self.state:9}{entry.stage:12}{self.size:10.3g} in [{low:.3g}, {high:.3g}]  {entry.name}: {entry.says}"


def bounds(entry: Entry) -> tuple[float, float]:
    """Range of sizes that are this difference. A `structure-*` entry has no lower end: less noise is no news."""
    if not entry.slack:
        return entry.measured, entry.measured
    low = 0.0 if entry.name.startswith("structure-") else entry.measured / entry.slack
    return low, entry.measured * entry.slack


def check_ledger(bench: Bench | None = None) -> Iterator[Outcome]:
    """Measures every entry. Needs transformers: see `Transformers().availability()`."""
    bench = bench or Bench()
    for entry in LEDGER:
        yield Outcome(entry, entry.measure(bench))


def rows() -> list[dict[str, str]]:
    """The ledger as a table: what differs, its size today, the range that is known, and whether it still is."""
    found = []
    for outcome in check_ledger():
        low, high = bounds(outcome.entry)
        size, known = f"{outcome.size:.3g}", f"{low:.3g} to {high:.3g}"
        entry = outcome.entry
        found.append(
            {
                "difference": entry.name,
                "stage": entry.stage,
                "size": size,
                "known": known,
                "state": outcome.state,
                "says": entry.says,
            }
        )
    return found


def _structure(stage: StageName, tensor: str = "value") -> Entry:
    """Nothing else: fp32 modules on the oracle's own upstream tensors give the oracle's stage up to fp32 noise."""

    def measure(bench: Bench) -> float:
        return relative(bench.stage(stage, bench.oracle, tensor=tensor), bench.oracle[stage][tensor])

    return Entry(f"structure-{stage}-{tensor}", stage, "nothing else differs, in fp32", measure, FP32_NOISE, 1.0)


def _query_norm(bench: Bench) -> float:
    query = bench.inputs.attn_query
    module = Transformers("bf16").module(bench.inputs, query.shape[1])
    wide = query.double()
    exact = wide * (wide.square().mean(-1, keepdim=True) + bench.inputs.config.rms_norm_eps).rsqrt()
    return relative(module.q_b_norm(query), exact.to(torch.bfloat16))


def _selection_differs(bench: Bench) -> float:
    chosen, want = bench.stage("topk", bench.oracle), bench.oracle.value("topk")
    return float((chosen.sort(-1).values != want.sort(-1).values).sum())


def _rows_in_positional_order(bench: Bench) -> float:
    """Rows that see all they may select and list it in order of position, as SGLang does."""
    chosen, visible = bench.stage("topk", bench.oracle), bench.inputs.visible
    rows = ((visible > 1) & (visible <= chosen.shape[1])).nonzero().squeeze(1)
    return float(sum(bool((row[:n].diff() > 0).all()) for row, n in zip(chosen[rows], visible[rows], strict=True)))


LEDGER = (
    Entry(
        "hadamard-absent",
        "index_k",
        "keys are not transformed; published: orthonormal Hadamard of 128",
        lambda b: relative(b.stage("index_k", b.oracle, hadamard="absent"), b.oracle.value("index_k")),
        1.41,
        1.05,
    ),
    Entry(
        "hadamard-absent-query",
        "index_q",
        "queries are not transformed either, so scores do not change",
        lambda b: relative(b.stage("index_q", b.oracle, hadamard="absent"), b.oracle.value("index_q")),
        1.41,
        1.05,
    ),
    Entry(
        "fake-quant-absent",
        "index_k",
        "keys stay bf16; published: FP4 in blocks of 32",
        lambda b: relative(b.deepseek.value("index_k"), b.bf16.value("index_k")),
        0.115,
    ),
    Entry(
        "fake-quant-absent-query",
        "index_q",
        "queries stay bf16; published: FP4 in blocks of 32",
        lambda b: relative(b.deepseek.value("index_q"), b.bf16.value("index_q")),
        0.115,
    ),
    Entry(
        "gemm-output-bf16",
        "compressed",
        "compressor projections return bf16; published: fp32",
        lambda b: relative(b.fp32_coarse.value("compressed"), b.fp32.value("compressed")),
        2.2e-3,
    ),
    Entry(
        "gate-cast-bf16",
        "compressed",
        "softmax in fp32, then weights, products and sum in bf16; published: fp32 throughout, rounded once",
        lambda b: relative(b.bf16.value("compressed"), b.fp32_coarse.value("compressed").to(torch.bfloat16)),
        3.3e-3,
    ),
    Entry(
        "rope-table-bf16",
        "index_q",
        "cosines and sines are rounded to the activations' bf16; published: fp32",
        lambda b: relative(
            b.stage("index_q", b.oracle, "bf16", "absent"),
            b.stage("index_q", b.oracle, "fp32", "absent").to(torch.bfloat16),
        ),
        1.43e-3,
    ),
    Entry(
        "head-weight-fp32",
        "head_weight",
        "the constant is applied in fp32; published: bf16 product",
        lambda b: relative(b.bf16.value("head_weight"), b.deepseek.value("head_weight")),
        1.56e-3,
    ),
    Entry(
        "score-fp32",
        "score",
        "products, weighted terms and sum stay fp32; published: each rounded to bf16",
        lambda b: relative(b.stage("score", b.deepseek), b.deepseek.value("score")),
        2.75e-3,
    ),
    Entry(
        "selection-by-score",
        "topk",
        "rows that keep everything list it by score; SGLang lists it by position (rows in that order)",
        _rows_in_positional_order,
        0.0,
        0.0,
    ),
    Entry(
        "latent-gate-bf16",
        "kv",
        "compressed latents inherit the bf16 projections, gate cast and RoPE table",
        lambda b: relative(b.bf16["kv"]["compressed"], b.deepseek["kv"]["compressed"]),
        4.3e-3,
    ),
    Entry(
        "window-rope-table-bf16",
        "kv",
        "window latents round where the published ones do, but for the RoPE table",
        lambda b: relative(b.bf16["kv"]["window"], b.deepseek["kv"]["window"]),
        7.4e-4,
    ),
    Entry(
        "query-rsqrt-bf16",
        "attention",
        "the query's rsqrt is rounded to bf16 before the product; exact: one rounding",
        _query_norm,
        2.76e-3,
    ),
    Entry(
        "logits-bf16",
        "attention",
        "logits and normalised probabilities are bf16, sink inside; published: fp32 logits, bf16 unnormalised P",
        lambda b: relative(b.stage("attention", b.deepseek, "bf16"), b.deepseek.value("attention")),
        6.1e-3,
    ),
    _structure("compressed"),
    _structure("index_k"),
    _structure("index_q"),
    _structure("head_weight"),
    _structure("score"),
    _structure("attention"),
    _structure("kv", "window"),
    _structure("kv", "compressed"),
    _structure("attention", "lse"),
    Entry(
        "structure-topk", "topk", "same sets as the exact selection (entries that differ)", _selection_differs, 0.0, 0.0
    ),
)
