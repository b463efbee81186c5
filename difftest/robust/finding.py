"""The verdict of one robustness check, and the comparisons that it rests on."""

import torch
from torch import Tensor

from ..stages import StageName
from ..verdict import EXIT_CODES, Answer, Verdict

CASE = "robustness"


def verdict(subject: str, stage: StageName | None, check: str, why: str, answer: Answer | None = None) -> Verdict:
    """A verdict on `check` of a kernel or path: it agrees where `why` is empty and no other answer is given."""
    found: Answer = answer or ("bug" if why else "agrees")
    return Verdict(CASE, -1, "csa", subject, found, why, EXIT_CODES[found], stage=stage, rule=check)


def same_bits(got: Tensor, want: Tensor) -> bool:
    """Whether two tensors are equal bit for bit, NaN included."""
    return got.shape == want.shape and got.dtype == want.dtype and torch.equal(_bytes(got), _bytes(want))


def difference(got: Tensor, want: Tensor) -> str:
    """Where two tensors of one shape first differ in bits, with both values and how many elements do."""
    if got.shape != want.shape:
        return f"shape {list(got.shape)} and not {list(want.shape)}"
    size = got.element_size()
    wrong = (_bytes(got).view(-1, size) != _bytes(want).view(-1, size)).any(1).view(got.shape)
    first = wrong.nonzero()[0].tolist()
    at = tuple(first)
    return (
        f"{int(wrong.sum())} of {wrong.numel()} elements differ, the first at {first}: "
        f"{got[at].item()!r} and {want[at].item()!r}"
    )


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
