"""A decode step's compressors and indexer as a CUDA graph, replayed with the metadata and tensors of later steps.

SGLang's decode graphs replay so: a step's metadata is copied in place into that of the capture, then the graph runs.
"""

from dataclasses import dataclass
from typing import Any

import torch

from ._layer_taps import Modules, Seen, taps


@dataclass(frozen=True)
class DecodeGraph:
    """A captured step. `modules` and `metadata` hold the addresses that the graph reads, `seen` those it writes."""

    graph: Any
    batch_size: int
    metadata: Any
    modules: Modules
    seen: Seen

    @classmethod
    def capture(cls, backend: Any, batch: Any, modules: Modules) -> "DecodeGraph":
        """Captures the step that `backend` is prepared for; it must have run before, so that its kernels are built."""
        graph, seen = torch.cuda.CUDAGraph(), Seen()
        torch.cuda.synchronize()
        with taps(backend, seen), torch.cuda.graph(graph):
            modules.run(backend, batch, seen)
        return cls(graph, batch.batch_size, backend.forward_metadata, modules, seen)

    def fits(self, backend: Any, batch: Any) -> bool:
        """Whether a step has the shapes of the capture: as many requests, and as wide a page table."""
        now, then = (metadata.core_metadata.page_table for metadata in (backend.forward_metadata, self.metadata))
        return bool(batch.batch_size == self.batch_size and now.shape == then.shape)

    def replay(self, backend: Any, modules: Modules) -> Seen:
        """Runs the graph on the step that `backend` is prepared for, and leaves the backend with its results."""
        self.metadata.copy_(backend.forward_metadata)
        backend.forward_metadata = self.metadata
        for static, fresh in zip(self.modules.given, modules.given, strict=True):
            static.copy_(fresh)
        self.graph.replay()
        return self.seen
