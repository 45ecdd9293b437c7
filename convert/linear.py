"""The canonical forms of a linear layer's weight: every format unpacks to one of these and packs from it.

Shapes use the project's letters: K in-features, N out-features, G = ceil(K / group).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from turbomill.errors import CheckpointError


@dataclass(frozen=True)
class QuantScheme:
    """How weights are quantized: `bits` per code, `group` rows to a scale (-1: all), `symmetric` or not.

    Symmetric means that every zero is 2**(bits - 1); with `mins`, a group adds a number of its own instead
    of subtracting a zero (GGUF's Q4_1). A QuantLinear's own scheme always has a positive group.
    """

    bits: int
    group: int
    symmetric: bool
    mins: bool = False

    def __str__(self) -> str:
        kind = "min" if self.mins else "sym" if self.symmetric else "asym"
        return f"w{self.bits}g{self.group}{kind}"

    @property
    def bits_per_weight(self) -> float:
        """Bits a weight costs with its share of the fp16 scale and, if asymmetric, the zero."""
        if self.group <= 0:  # one scale per column
            return float(self.bits)
        beside = 16 if self.mins else 0 if self.symmetric else self.bits
        return self.bits + (16 + beside) / self.group


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
class QuantGrid:
    """A quantized linear but for its codes; the fields are QuantLinear's."""

    k: int
    scales: Tensor  # [G, N]
    zeros: Tensor  # uint8 [G, N]
    scheme: QuantScheme
    bias: Tensor | None = None  # [N]
    mins: Tensor | None = None  # [G, N]
    order: Tensor | None = None  # int32 [K]

    def with_codes(self, codes: Tensor) -> QuantLinear:
        """The linear of codes [K, N]."""
        return QuantLinear(codes, self.scales, self.zeros, self.scheme, self.bias, self.mins, self.order)

    def with_mins(self) -> QuantGrid:
        """The same weights with a minimum for each group: exact where the zeros are powers of two."""
        if self.mins is not None:
            return self
        mins = (-self.zeros.float() * self.scales.float()).to(self.scales.dtype)
        scheme = replace(self.scheme, symmetric=False, mins=True)
        return replace(self, zeros=torch.zeros_like(self.zeros), mins=mins, scheme=scheme)

    def validate(self, name: str, n: int) -> None:
        """Check shapes, dtypes and ranges; raise CheckpointError naming `name` and what is wrong."""
        groups = -(-self.k // self.scheme.group)
        if self.zeros.dtype != torch.uint8:
            raise CheckpointError(f"{name}: codes and zeros must be uint8")
        if (self.mins is not None) != self.scheme.mins or (self.scheme.mins and bool(self.zeros.any())):
            raise CheckpointError(f"{name}: scheme {self.scheme} has minima, or zeros, and not both")
        beside = {"scales": self.scales, "zeros": self.zeros, "mins": self.mins}
        for what, tensor in ((what, tensor) for what, tensor in beside.items() if tensor is not None):
            if tuple(tensor.shape) != (groups, n):
                raise CheckpointError(
                    f"{name}: {what} have shape {tuple(tensor.shape)}, expected {(groups, n)} for "
                    f"K={self.k}, N={n}, group {self.scheme.group}"
                )
        top = 2**self.scheme.bits
        if int(self.zeros.max()) >= top:
            raise CheckpointError(f"{name}: a code or zero does not fit in {self.scheme.bits} bits")
        if self.scheme.symmetric and not bool((self.zeros == top // 2).all()):
            raise CheckpointError(f"{name}: the scheme is symmetric, but not all zeros are {top // 2}")
        if not all_finite(self.scales):
            raise CheckpointError(f"{name}: scales hold inf or NaN")
        if self.mins is not None and not all_finite(self.mins):
            raise CheckpointError(f"{name}: minima hold inf or NaN")


@dataclass(frozen=True)
class QuantLinear:
    """A group-quantized linear: w[k, n] = (codes[k, n] - zeros[k // group, n]) * scales[k // group, n].

    `zeros` are the zeros themselves (never minus one) and hold integers for every integer format. Where the
    scheme has `mins`, they are all 0 and mins[k // group, n] is added. Row k meets input k, or `order[k]`.
    """

    codes: Tensor  # uint8 [K, N], each below 2**bits
    scales: Tensor  # fp16 or bf16 or fp32 [G, N]
    zeros: Tensor  # uint8 [G, N]
    scheme: QuantScheme
    bias: Tensor | None = None  # [N]
    mins: Tensor | None = None  # as scales [G, N]
    order: Tensor | None = None  # int32 [K], a permutation

    @property
    def shape(self) -> tuple[int, int]:
        """(K, N)."""
        return self.codes.shape[0], self.codes.shape[1]

    def columns(self, index: Tensor | slice) -> QuantLinear:
        """The linear of some of the outputs, or of all in another order."""
        parts = (self.codes, self.scales, self.zeros, self.mins)
        codes, scales, zeros, mins = (None if p is None else p[:, index].contiguous() for p in parts)
        assert codes is not None and scales is not None and zeros is not None
        bias = None if self.bias is None else self.bias[index]
        return replace(self, codes=codes, scales=scales, zeros=zeros, mins=mins, bias=bias)

    @property
    def grid(self) -> QuantGrid:
        """What stands beside the codes."""
        k, _ = self.shape
        return QuantGrid(k, self.scales, self.zeros, self.scheme, self.bias, self.mins, self.order)

    def validate(self, name: str) -> None:
        """Check shapes, dtypes and ranges; raise CheckpointError naming `name` and what is wrong."""
        if self.codes.dtype != torch.uint8:
            raise CheckpointError(f"{name}: codes and zeros must be uint8")
        self.grid.validate(name, self.shape[1])
        if int(self.codes.max()) >= 2**self.scheme.bits:
            raise CheckpointError(f"{name}: a code or zero does not fit in {self.scheme.bits} bits")

    def dequantize(self) -> Tensor:
        """The weight [N, K] in fp32."""
        k, _ = self.shape
        group = torch.arange(k) // self.scheme.group
        scales, zeros = self.scales.float()[group], self.zeros.float()[group]
        weight = (self.codes.float() - zeros) * scales  # [K, N]
        if self.mins is not None:
            weight += self.mins.float()[group]
        if self.order is not None:
            weight = torch.empty_like(weight).index_copy_(0, self.order.long(), weight)
        return weight.T.contiguous()


Linear = DenseLinear | QuantLinear


def all_finite(values: Tensor) -> bool:
    """Whether there is neither inf nor NaN in fp16, bf16 or fp32 values: their sum in fp64 cannot overflow,
    and shows either. Several times faster than asking each of them."""
    return bool(torch.isfinite(values.sum(dtype=torch.float64)))


def storable_scales(name: str, scales: Tensor) -> Tensor:
    """Scales in 16 bits: fp16 or bf16 as they are, fp32 as fp16. Raises CheckpointError beyond its range."""
    stored = scales if scales.dtype in (torch.float16, torch.bfloat16) else scales.half()
    if not all_finite(stored):
        raise CheckpointError(f"{name}: scales beyond fp16 (65504); quantize a bf16 model instead")
    return stored.contiguous()
