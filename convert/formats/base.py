"""What every weight format offers: recognise, check, unpack to the canonical linear, pack from it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from turbomill.convert.formats.packed import PackedLinear
from turbomill.convert.linear import Linear, QuantScheme


class TensorSource(Protocol):
    """Where a format reads its tensors: a checkpoint."""

    def has(self, name: str) -> bool: ...
    def tensor(self, name: str) -> Tensor: ...
    def dtype_of(self, name: str) -> torch.dtype: ...


@dataclass(frozen=True)
class WeightFormat(ABC):
    """How one family of checkpoints stores its linears. `prefix` is a linear's name without `.weight`."""

    name: ClassVar[str]
    scheme: QuantScheme | None  # the model's; a linear's own comes with its QuantLinear

    @classmethod
    @abstractmethod
    def recognise(cls, config: dict[str, Any]) -> WeightFormat | None:
        """The format config.json describes, or None if it is another's. Raises for unsupported options."""

    def scheme_of(self, prefix: str, k: int) -> QuantScheme | None:
        """One linear's scheme, its group resolved (-1 is K); None for a dense linear."""
        if self.scheme is None or self.scheme.group > 0:
            return self.scheme
        return replace(self.scheme, group=k)

    def misfit(self, prefix: str, k: int, n: int) -> str:
        """Why the format cannot store a linear of K x N in its scheme; empty when it can."""
        return ""

    @abstractmethod
    def expected(self, prefix: str, k: int, n: int) -> dict[str, tuple[int, ...]]:
        """The tensors a linear of K x N needs, bias apart, and their shapes."""

    @abstractmethod
    def optional(self, prefix: str) -> Sequence[str]:
        """Names that may also be there."""

    @abstractmethod
    def values(self, prefix: str) -> str:
        """The tensor whose dtype the linear's weights have: a dense weight, or the scales."""

    @abstractmethod
    def unpack(self, source: TensorSource, prefix: str) -> Linear:
        """Read one linear into its canonical form. Raises CheckpointError naming the tensor."""

    def packed(self, source: TensorSource, prefix: str) -> PackedLinear | None:
        """One linear with its codes left in their words, or None: `unpack` reads it. Raises as `unpack`."""
        return None

    def order(self, source: TensorSource, prefix: str) -> Tensor | None:
        """The input that each row of a linear's codes meets, int32 [K]; None where row k meets input k."""
        return None

    def dtype(self, source: TensorSource, prefix: str) -> torch.dtype:
        """The dtype of the linear's weights or, quantized, of its scales."""
        return source.dtype_of(self.values(prefix))

    @abstractmethod
    def pack(self, prefix: str, linear: Linear) -> dict[str, Tensor]:
        """The tensors that store `linear`, by name, its bias included."""

    @abstractmethod
    def quantization_config(self) -> dict[str, Any] | None:
        """What config.json says under `quantization_config`; None for a dense model."""


def bias_of(source: TensorSource, prefix: str) -> Tensor | None:
    """The linear's bias [N], or None."""
    return source.tensor(f"{prefix}.bias") if source.has(f"{prefix}.bias") else None
