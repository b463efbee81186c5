"""A kernel of your own as a path: it prepares the index query, everything else is taken from `bf16-k`."""

import torch
from difftest.reference.inputs import LayerInputs

from difftest.paths.bf16_k import Bf16K
from difftest.trace import StageTensors, Trace


class MyKernel(Bf16K):
    """The index query with the Hadamard transform applied in a hurry: its last step is missing."""

    name = "my-kernel"
    says = "the example of the documentation"

    def index_q(self, inputs: LayerInputs, trace: Trace) -> StageTensors:
        query = super().index_q(inputs, trace)["value"]
        return {"value": undo_last_butterfly(query)}


def undo_last_butterfly(x: torch.Tensor) -> torch.Tensor:
    """x without the step that joins its two halves: what a loop gives that ends one round early."""
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low + high, low - high), -1).mul(2**-0.5).bfloat16().float()
