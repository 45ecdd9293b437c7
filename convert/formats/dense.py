"""Unquantized linears: `X.weight` [N, K] and optional `X.bias` [N]."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from turbomill.convert.formats.base import TensorSource, WeightFormat, bias_of
from turbomill.convert.linear import DenseLinear, Linear, QuantLinear


@dataclass(frozen=True)
class DenseFormat(WeightFormat):
    """A checkpoint without `quantization_config`."""

    name = "dense"
    scheme: None = None

    @classmethod
    def recognise(cls, config: dict[str, Any]) -> DenseFormat | None:
        """Dense when config.json has no `quantization_config`."""
        return None if config.get("quantization_config") else cls()

    def expected(self, prefix: str, k: int, n: int) -> dict[str, tuple[int, ...]]:
        """`X.weight` [N, K]."""
        return {f"{prefix}.weight": (n, k)}

    def optional(self, prefix: str) -> Sequence[str]:
        """Nothing."""
        return ()

    def values(self, prefix: str) -> str:
        """weight."""
        return f"{prefix}.weight"

    def unpack(self, source: TensorSource, prefix: str) -> DenseLinear:
        """The weight as stored."""
        return DenseLinear(source.tensor(f"{prefix}.weight"), bias_of(source, prefix))

    def pack(self, prefix: str, linear: Linear) -> dict[str, Tensor]:
        """A quantized linear is written dequantized, in the dtype of its scales."""
        weight = (
            linear.dequantize().to(linear.scales.dtype) if isinstance(linear, QuantLinear) else linear.weight
        )
        tensors = {f"{prefix}.weight": weight}
        return tensors if linear.bias is None else {**tensors, f"{prefix}.bias": linear.bias}

    def quantization_config(self) -> None:
        """None."""
        return None
