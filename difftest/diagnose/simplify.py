"""Simpler values for the tensors of a layer: constants, signs, powers of two, and zeros wherever they can be.

Produced here, tried one by one by `shrink`, which keeps those under which the same failure remains.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..capture import input_tensors
from ..reference.inputs import LayerInputs

WEIGHTS = ("norm_weight", "kv_norm_weight")
FEW_BITS = 3
"""Significant bits of a value that people can read: 1, 1.25, 1.5, 1.75 times a power of two."""


def float_tensors(inputs: LayerInputs) -> dict[str, Tensor]:
    """The layer's numbers, by dotted name; index and page tensors are left out."""
    return {
        name: tensor for name, tensor in input_tensors(inputs).items() if tensor.is_floating_point() and tensor.numel()
    }


def with_tensor(inputs: LayerInputs, name: str, tensor: Tensor) -> LayerInputs:
    """The layer with one tensor replaced, in that tensor's dtype."""
    owner, _, part = name.rpartition(".")
    tensor = tensor.to(input_tensors(inputs)[name].dtype)
    if not owner:
        return replace(inputs, **{part: tensor})  # type: ignore[arg-type]
    return replace(inputs, **{owner: replace(getattr(inputs, owner), **{part: tensor})})


@dataclass(frozen=True)
class Rule:
    """How a tensor's values become simpler; `words` completes "index.ape is ..."."""

    words: str
    apply: Callable[[str, Tensor], Tensor]


def _constant(name: str, x: Tensor) -> Tensor:
    """0, or 1 for the weight of a norm, which would otherwise erase what it weighs."""
    return torch.ones_like(x) if name.endswith(WEIGHTS) else torch.zeros_like(x)


def _same_rows(name: str, x: Tensor) -> Tensor:
    return x[:1].expand_as(x) if x.ndim > 1 else x


def _signs(name: str, x: Tensor) -> Tensor:
    return x.sign()


def _powers_of_two(name: str, x: Tensor) -> Tensor:
    return torch.where(
        x == 0, 0.0, x.sign() * torch.exp2(x.double().abs().clamp(min=torch.finfo(x.dtype).tiny).log2().round())
    )


def _few_bits(name: str, x: Tensor) -> Tensor:
    significand, power = torch.frexp(x.double())
    return torch.ldexp((significand * 2**FEW_BITS).round() / 2**FEW_BITS, power)


RULES: tuple[Rule, ...] = (
    Rule("constant", _constant),
    Rule("one row repeated", _same_rows),
    Rule("signs", _signs),
    Rule("powers of two", _powers_of_two),
    Rule(f"rounded to {FEW_BITS} bits", _few_bits),
)
"""Simplest first."""


@dataclass(frozen=True)
class Simpler:
    """A layer with simpler values, what was done to which tensor, and how many values that changed."""

    inputs: LayerInputs
    name: str
    words: str
    changed: int


def whole_tensors(inputs: LayerInputs, name: str) -> Iterator[Simpler]:
    """The layer with all values of one tensor simplified, simplest first, as far as that changes anything.

    No value at its constant is lost: a first row repeated over zeros would only be zeroed again, without end.
    """
    tensor = input_tensors(inputs)[name]
    constant = _constant(name, tensor)
    most = int((tensor != constant).sum())
    for rule in RULES:
        simple = rule.apply(name, tensor).to(tensor.dtype)
        changed = int((simple != tensor).sum())
        if changed and int((simple != constant).sum()) <= most:
            yield Simpler(with_tensor(inputs, name, simple), name, rule.words, changed)


def zeroed(inputs: LayerInputs, name: str, axis: int, places: list[int]) -> Simpler | None:
    """The layer with some rows, columns, ... of one tensor at their constant; None if they are already."""
    tensor = input_tensors(inputs)[name]
    simple = tensor.clone()
    index = torch.tensor(places)
    simple.index_copy_(axis, index, _constant(name, tensor).index_select(axis, index))
    changed = int((simple != tensor).sum())
    return Simpler(with_tensor(inputs, name, simple), name, "partly constant", changed) if changed else None


def complexity(inputs: LayerInputs) -> dict[str, str]:
    """What the values of every tensor are now, in words: "zero", "12 of 512 values, powers of two"."""
    return {name: _complexity(name, tensor) for name, tensor in float_tensors(inputs).items()}


def _complexity(name: str, x: Tensor) -> str:
    constant = _constant(name, x)
    if torch.equal(x, constant):
        return "one" if name.endswith(WEIGHTS) else "zero"
    off = int((x != constant).sum())
    count = f"{off} of {x.numel()} values differ from 1" if name.endswith(WEIGHTS) else f"{off} of {x.numel()} values"
    for rule in RULES[2:]:
        if torch.equal(rule.apply(name, x).to(x.dtype), x):
            return f"{count}, {rule.words}"
    return count
