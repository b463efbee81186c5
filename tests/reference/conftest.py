"""Small layers for the reference's tests: real structure, few heads, narrow latents."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from difftest.cases.case import Case, Mode
from difftest.cases.generate import generate
from difftest.reference.inputs import CompressorInputs, LayerInputs
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

LAYER = {"swa": 0, "csa": 2, "hca": 3}
SMALL = {"index_n_heads": 4, "num_attention_heads": 3, "head_dim": 128, "index_topk": 16, "sliding_window": 24}

MakeLayer = Callable[..., LayerInputs]


@pytest.fixture(autouse=True)
def one_thread_and_one_seed() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def make_layer() -> MakeLayer:
    """Inputs of a small layer: make_layer(kind, lengths, mode=..., seed=..., **Case fields)."""

    def make(
        kind: str = "csa",
        lengths: tuple[int, ...] = (300, 171),
        mode: Mode = "prefill",
        seed: int = 0,
        **fields: object,
    ) -> LayerInputs:
        fields.setdefault("overrides", SMALL)
        fields.setdefault("rows", 12)
        case = Case(f"small-{kind}", "gaussian", lengths, mode=mode, base_seed=seed, **fields)  # type: ignore[arg-type]
        return generate(case, LAYER[kind])

    return make


@pytest.fixture(scope="session")
def reorder_requests() -> Callable[[LayerInputs, Sequence[int]], LayerInputs]:
    """The same layer with its requests in another order; rows and windows keep their places."""
    return _reorder_requests


def _reorder_requests(inputs: LayerInputs, order: Sequence[int]) -> LayerInputs:
    place = torch.tensor([list(order).index(request) for request in range(len(order))])

    def reorder(compressor: CompressorInputs | None) -> CompressorInputs | None:
        if compressor is None:
            return None
        pieces = [compressor.kv_score[inputs.token_offset[r] : inputs.token_offset[r + 1]] for r in order]
        prefix = compressor.pooled_prefix.split(list(inputs.prefix_entries))
        return replace(compressor, kv_score=torch.cat(pieces), pooled_prefix=torch.cat([prefix[r] for r in order]))

    return replace(
        inputs,
        lengths=tuple(inputs.lengths[r] for r in order),
        prefix_entries=tuple(inputs.prefix_entries[r] for r in order),
        row_request=place[inputs.row_request],
        window_request=place[inputs.window_request],
        index=reorder(inputs.index),
        main=reorder(inputs.main),
        page_table=inputs.page_table[list(order)],
    )


@pytest.fixture
def normal() -> Callable[..., Tensor]:
    """Gaussian fp64 tensors that depend on nothing but the seed and shape: normal(seed, *shape)."""
    return lambda seed, *shape: torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class LargestTensor(TorchDispatchMode):
    """Bytes of the largest tensor that any operation inside the block returned, views included at their own size."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(tensor, Tensor):
                self.bytes = max(self.bytes, tensor.numel() * tensor.element_size())
        return result


@pytest.fixture
def largest_tensor() -> type[LargestTensor]:
    """A context manager that measures memory without depending on the allocator: `with largest_tensor() as seen`."""
    return LargestTensor
