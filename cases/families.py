"""Families: how a case shapes the tensors of a layer. One function each, from plain Gaussian inputs to shaped ones."""

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

from ..reference.inputs import LayerInputs
from .draw import Draw

Family = Callable[[LayerInputs, Draw, Mapping[str, Any]], LayerInputs]


def gaussian(inputs: LayerInputs, draw: Draw, params: Mapping[str, Any]) -> LayerInputs:
    """Independent unit normals everywhere: the hard case for a quantised selection, having no heavy tail."""
    return inputs


FAMILIES: dict[str, Family] = {"gaussian": gaussian}


def family(name: str) -> Family:
    """The family called `name`; ValueError with the nearest names otherwise."""
    if name not in FAMILIES:
        close = get_close_matches(name, FAMILIES, n=3, cutoff=0.4) or sorted(FAMILIES)
        raise ValueError(f"unknown family {name!r}: did you mean {', '.join(close)}?")
    return FAMILIES[name]
