"""Random numbers of a case: one independent stream a tensor, so that adding a tensor changes no other."""

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Draw:
    """Draws tensors on the CPU from `seed` and the tensor's name; equal names give equal numbers.

    Every method returns a fresh CPU tensor. The stream of a name depends on nothing but `seed` and the name.
    """

    seed: int

    def generator(self, name: str) -> torch.Generator:
        digest = hashlib.sha256(f"{self.seed}/{name}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") % (1 << 63))

    def normal(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Standard normal values, drawn in fp32 and then rounded to `dtype`.

        Bit for bit the same on every x86-64 processor with AVX2. On others torch takes its logarithm and cosine from
        elsewhere and the last fp32 bit may differ: recorded traces, which carry a fingerprint of their inputs, do not
        apply there.
        """
        return torch.randn(shape, generator=self.generator(name)).to(dtype)

    def uniform(self, name: str, *shape: int) -> Tensor:
        """Values in [0, 1), fp32."""
        return torch.rand(shape, generator=self.generator(name))

    def integers(self, name: str, low: int, high: int, *shape: int) -> Tensor:
        """Integers in [low, high), int64."""
        return torch.randint(low, high, shape, generator=self.generator(name))

    def signs(self, name: str, *shape: int) -> Tensor:
        """+1 and -1 with equal chance, fp32."""
        return self.integers(name, 0, 2, *shape).float() * 2 - 1

    def permutation(self, name: str, count: int) -> Tensor:
        """A random order of 0 .. count - 1, int64."""
        return torch.randperm(count, generator=self.generator(name))

    def student(self, name: str, degrees: int, *shape: int) -> Tensor:
        """Student-t values with `degrees` degrees of freedom, fp32: heavier tails the fewer there are."""
        generator = self.generator(name)
        top = torch.randn(shape, generator=generator)
        square = torch.zeros(shape)
        for _ in range(degrees):
            square += torch.randn(shape, generator=generator).square_()
        return top / (square / degrees).clamp_min(math.ulp(1.0)).sqrt()
