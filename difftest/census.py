"""What a number format will cost on given data: key statistics, the census of the cut, expected recall by format."""

from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from .reference import oracle
from .reference.formats import Quantiser, dequantise, quantise, round_bf16
from .reference.hadamard import hadamard
from .reference.inputs import LayerInputs
from .selection import cut, recall

FORMATS: dict[str, tuple[Quantiser, Quantiser]] = {
    "bf16 q and k": ("bf16", "bf16"),
    "fp8 k": ("none", "e4m3"),
    "fp8 q": ("e4m3", "none"),
    "fp8 q and k": ("e4m3", "e4m3"),
    "fp4 q and k": ("e2m1", "e2m1"),
}
"""(query, key) quantiser of every format whose recall is expected. Scores are exact: this is the format alone."""
LOW = 0.01
"""The quantile reported beside mean and worst."""


@dataclass(frozen=True)
class KeyStatistics:
    """Index keys as they are quantised (after norm, RoPE and Hadamard).

    rms, largest   over all elements.   crest  mean over keys of largest / rms: 1 for a constant, 11.3 for one spike.
    before         the same crest before the Hadamard transform (which it should lower).
    spread         ratio of the 99th to the 1st percentile of the keys' largest element: how much a scale has to follow.
    floored        share of keys whose largest element is under the e4m3 quantiser's floor of 1e-4.
    """

    rms: float
    largest: float
    crest: float
    before: float
    spread: float
    floored: float


@dataclass(frozen=True)
class Boundary:
    """The cut of the rows that have more visible entries than picks, by the exact scores.

    gap        median of (k-th score - next score) / standard deviation of the row's scores.
    tied       share of rows in which an entry with exactly the k-th score is left out.
    tied_bf16  the same for scores rounded to bf16, as DeepSeek publishes them.
    equal_bf16 mean number of entries with the k-th score after that rounding.
    """

    gap: float
    tied: float
    tied_bf16: float
    equal_bf16: float


@dataclass(frozen=True)
class Recall:
    """Recall of the exact selection by one format: mean, 1st percentile, worst over the exercised rows."""

    format: str
    mean: float
    low: float
    worst: float


@dataclass(frozen=True)
class Census:
    """The census of one layer. `note` says why boundary and recall are missing ("selection not exercised: ...")."""

    name: str
    layer: int
    rows: int
    keys: KeyStatistics
    boundary: Boundary | None
    recalls: tuple[Recall, ...]
    note: str = ""

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def take_census(name: str, inputs: LayerInputs) -> Census:
    """The census of a csa layer's inputs, all in fp64. ValueError for a layer without an indexer."""
    if inputs.kind != "csa":
        raise ValueError(f"{name} is a {inputs.kind} layer, which has no indexer; give csa layers")
    exact_k = oracle.index_k(inputs, oracle.compressed(inputs))
    exact_q, weight = oracle.index_q(inputs), oracle.head_weight(inputs)
    score = oracle.score(inputs, exact_k, exact_q, weight)
    k, visible = inputs.config.index_topk, inputs.visible
    keys = key_statistics(exact_k)
    exercised = visible > k
    if not exercised.any():
        note = f"selection not exercised: at most {int(visible.max())} of {k} entries visible"
        return Census(name, inputs.layer, 0, keys, None, (), note)
    wanted = oracle.topk(inputs, score)
    recalls = tuple(
        _recall(label, inputs, wanted, stored(exact_q, query), stored(exact_k, key), weight, exercised)
        for label, (query, key) in FORMATS.items()
    )
    boundary = _boundary(score[exercised], visible[exercised], k)
    return Census(name, inputs.layer, int(exercised.sum()), keys, boundary, recalls)


def stored(exact: Tensor, quantiser: Quantiser) -> Tensor:
    """`exact` [..., D] after a round trip through the format, fp64."""
    return exact if quantiser == "none" else dequantise(*quantise(exact, quantiser))


def key_statistics(keys: Tensor) -> KeyStatistics:
    """Statistics of index keys [E, D] fp64; all zero when there is no key."""
    if not len(keys):
        return KeyStatistics(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    largest = keys.abs().amax(-1)
    low, high = torch.quantile(largest, torch.tensor([LOW, 1 - LOW], dtype=largest.dtype)).tolist()
    return KeyStatistics(
        float(keys.square().mean().sqrt()),
        float(largest.max()),
        _crest(keys),
        _crest(hadamard(keys)),
        high / low if low else torch.inf,
        float((largest < 1e-4).double().mean()),
    )


def _crest(keys: Tensor) -> float:
    rms = keys.square().mean(-1).sqrt()
    return float((keys.abs().amax(-1) / rms.clamp(min=torch.finfo(torch.float64).tiny)).mean())


def _recall(
    label: str, inputs: LayerInputs, wanted: Tensor, query: Tensor, key: Tensor, weight: Tensor, exercised: Tensor
) -> Recall:
    score = oracle.score(inputs, key, query, weight)
    share = recall(oracle.topk(inputs, score), wanted, score.shape[1])[exercised]
    return Recall(label, float(share.mean()), float(torch.quantile(share, LOW)), float(share.min()))


def _boundary(score: Tensor, visible: Tensor, k: int) -> Boundary:
    exact, rounded = cut(score, visible, k), cut(round_bf16(score), visible, k)
    shown = torch.arange(score.shape[1]) < visible[:, None]
    spread = torch.stack([row[mask].std() for row, mask in zip(score, shown, strict=True)])
    gap = (exact.kth - exact.next) / spread.clamp(min=torch.finfo(torch.float64).tiny)
    return Boundary(
        float(gap.median()),
        float(exact.tied.double().mean()),
        float(rounded.tied.double().mean()),
        float(rounded.equal.double().mean()),
    )
