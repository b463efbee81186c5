"""Faults, one for each emulatable kind of public report, planted into a path by wrapping one of its building blocks.

    path = plant("bf16-k", "l8-step-visibility")     # a path like any other, with that fault in it
    mutants("bf16-k")                                # every mutant that applies to a path, by name

`difftest run --path mutant:of=bf16-k,name=l8-step-visibility` does the same on the command line.
"""

from .mutant import Mutant, Planted, Seed
from .registry import find, mutants, plant

__all__ = ["Mutant", "Planted", "Seed", "find", "mutants", "plant"]
