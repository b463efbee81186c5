"""What SGLang's backend computes in a step and does not keep, and the modules that a layer run hands it."""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ._layer_backend import LAYER


@contextmanager
def tapped(owner: Any, name: str, see: Callable[..., None]) -> Iterator[None]:
    """Calls `see(result, *arguments, **keywords)` after every call of `owner.name` inside the block."""
    own = name in vars(owner)
    original = getattr(owner, name)

    def call(*args: Any, **keywords: Any) -> Any:
        result = original(*args, **keywords)
        see(result, *args, **keywords)
        return result

    setattr(owner, name, call)
    try:
        yield
    finally:
        setattr(owner, name, original) if own else delattr(owner, name)


@dataclass
class Seen:
    """References to what a step computed; read once the step is through, so that a graph can be captured meanwhile.

    pooled  (rows, compress plan) of each compressor.   query, folded  of the indexer.    slots  the selection.
    logits  (route, scores [rows, columns]), one for each chunk of rows.                  lse    (route, [T, A]).
    """

    pooled: list[tuple[Tensor, Any]] = field(default_factory=list)
    logits: list[tuple[str, Tensor]] = field(default_factory=list)
    lse: list[tuple[str, Tensor]] = field(default_factory=list)
    query: Tensor | None = None
    folded: Tensor | None = None
    slots: Tensor | None = None


@dataclass(frozen=True)
class Modules:
    """A layer's modules in one step: `number` [T, 1] int64 stands for the hidden states, the modules look up by it."""

    number: Tensor
    main: Any
    indexer: Any

    @property
    def given(self) -> list[Tensor]:
        """The step's tensors behind the modules, in a fixed order."""
        parts = [self.main, self.indexer, self.indexer and self.indexer.compressor]
        return [tensor for part in parts if part is not None for tensor in part.given]

    def run(self, backend: Any, batch: Any, seen: Seen) -> None:
        """Both compressors and the indexer, as SGLang's model calls them, into `seen` (whose taps are in place)."""
        if self.main is not None:
            backend.forward_core_compressor(self.number, batch, LAYER, self.main)
        if self.indexer is None:
            return

        def see(result: tuple[Tensor, Tensor], *_: Any, **__: Any) -> None:
            seen.query, seen.folded = result

        with tapped(self.indexer, "compute_q", see):
            backend.forward_c4_indexer(self.number, self.number, self.indexer, batch)
        seen.slots = backend.forward_metadata.core_metadata.c4_sparse_page_indices


def taps(backend: Any, seen: Seen) -> ExitStack:
    """A context in which `seen` fills with what the backend computes."""
    import tvm_ffi  # noqa: F401  deep_gemm links against it
    import deep_gemm  # isort: skip
    from sglang.kernels.ops.attention import flash_mla_interface
    from sglang.srt.layers.attention.dsv4 import compressor_v2

    def pooled(rows: Tensor, **call: Any) -> None:
        seen.pooled.append((rows, call["plan"]))

    def scores(route: str) -> Callable[..., None]:
        return lambda logits, *_, **__: seen.logits.append((route, logits))

    def decoded(result: tuple[Tensor, Tensor], **_: Any) -> None:
        seen.lse.append(("attention: decode", result[1].squeeze(-1)))

    def prefilled(result: tuple[Tensor, Tensor, Tensor], **_: Any) -> None:
        seen.lse.append(("attention: prefill", result[2] * math.log(2)))

    stack = ExitStack()
    stack.enter_context(tapped(compressor_v2, "compress_forward", pooled))
    stack.enter_context(tapped(deep_gemm, "fp8_paged_mqa_logits", scores("score: paged")))
    stack.enter_context(tapped(backend, "_nonpaged_mqa_logits", scores("score: gathered")))
    stack.enter_context(tapped(backend, "_flash_mla_with_kvcache", decoded))
    stack.enter_context(tapped(flash_mla_interface, "flash_mla_sparse_fwd", prefilled))
    return stack
