"""The canonical forms of a linear layer's weight: every format unpacks to one of these and packs from it.

Shapes use the project's letters: K in-features, N out-features, G = ceil(K / group).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from turbomill.errors import CheckpointError


@dataclass(frozen=True)
class QuantScheme:
    """How weights are quantized: `bits` per code, `group` rows to a scale (-1: all), `symmetric` or not.

    Symmetric means that every zero is 2**(bits - 1). A QuantLinear's own scheme always has a positive group.
    """

    bits: int
    group: int
    symmetric: bool

    def __str__(self) -> str:
        return f"w{self.bits}g{self.group}{'sym' if self.symmetric else 'asym'}"

    @property
    def bits_per_weight(self) -> float:
        """Bits a weight costs with its share of the fp16 scale and, if asymmetric, the zero."""
        if self.group <= 0:  # one scale per column
            return float(self.bits)
        return self.bits + (16 + (0 if self.symmetric else self.bits)) / self.group


@dataclass(frozen=True)
class DenseLinear:
    """An unquantized linear."""

    weight: Tensor  # [N, K]
    bias: Tensor | None = None  # [N]

    @property
    def shape(self) -> tuple[int, int]:
        """(K, N)."""
        return self.weight.shape[1], self.weight.shape[0]

    def dequantize(self) -> Tensor:
        """The weight [N, K] in fp32."""
        return self.weight.float()


@dataclass(frozen=True)
class QuantLinear:
    """A group-quantized linear: w[k, n] = (codes[k, n] - zeros[k // group, n]) * scales[k // group, n].

    `zeros` are the zeros themselves (never minus one) and hold integers for every integer format.
    """

    codes: Tensor  # uint8 [K, N], each below 2**bits
    scales: Tensor  # fp16 or bf16 or fp32 [G, N]
    zeros: Tensor  # uint8 [G, N]
    scheme: QuantScheme
    bias: Tensor | None = None  # [N]

    @property
    def shape(self) -> tuple[int, int]:
        """(K, N)."""
        return self.codes.shape[0], self.codes.shape[1]

    def validate(self, name: str) -> None:
        """Check shapes, dtypes and ranges; raise CheckpointError naming `name` and what is wrong."""
        k, n = self.shape
        groups = -(-k // self.scheme.group)
        if self.codes.dtype != torch.uint8 or self.zeros.dtype != torch.uint8:
            raise CheckpointError(f"{name}: codes and zeros must be uint8")
        for what, tensor in (("scales", self.scales), ("zeros", self.zeros)):
            if tuple(tensor.shape) != (groups, n):
                raise CheckpointError(
                    f"{name}: {what} have shape {tuple(tensor.shape)}, expected {(groups, n)} for "
                    f"K={k}, N={n}, group {self.scheme.group}"
                )
        top = 2**self.scheme.bits
        if int(self.codes.max()) >= top or int(self.zeros.max()) >= top:
            raise CheckpointError(f"{name}: a code or zero does not fit in {self.scheme.bits} bits")
        if self.scheme.symmetric and not bool((self.zeros == top // 2).all()):
            raise CheckpointError(f"{name}: the scheme is symmetric, but not all zeros are {top // 2}")
        if not bool(torch.isfinite(self.scales).all()):
            raise CheckpointError(f"{name}: scales hold inf or NaN")

    def dequantize(self) -> Tensor:
        """The weight [N, K] in fp32."""
        k, _ = self.shape
        group = torch.arange(k) // self.scheme.group
        scales, zeros = self.scales.float()[group], self.zeros.float()[group]
        return ((self.codes.float() - zeros) * scales).T.contiguous()


Linear = DenseLinear | QuantLinear


def storable_scales(name: str, scales: Tensor) -> Tensor:
    """Scales in 16 bits: fp16 or bf16 as they are, fp32 as fp16. Raises CheckpointError beyond its range."""
    stored = scales if scales.dtype in (torch.float16, torch.bfloat16) else scales.half()
    if not bool(torch.isfinite(stored).all()):
        raise CheckpointError(f"{name}: scales beyond fp16 (65504); quantize a bf16 model instead")
    return stored.contiguous()
