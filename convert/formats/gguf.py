"""GGUF's linears: Q4_0, Q4_1 and Q8_0 as codes in groups of 32. Every other block type is dense."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from turbomill.convert.formats.base import TensorSource, WeightFormat, bias_of
from turbomill.convert.gguf.blocks import codes_of
from turbomill.convert.linear import Linear, QuantLinear, QuantScheme
from turbomill.errors import CheckpointError


class BlockSource(Protocol):
    """A checkpoint of blocks."""

    def blocks(self, name: str) -> tuple[np.ndarray, str]:
        """A tensor's rows of bytes in Hugging Face's order, and their block type."""
        ...


@dataclass(frozen=True)
class GgufFormat(WeightFormat):
    """Linears of 4- or 8-bit blocks of 32. GGUF files are read, not written."""

    scheme: QuantScheme

    name = "gguf"

    @classmethod
    def recognise(cls, config: dict[str, Any]) -> None:
        """No config.json describes it: the file does."""
        return None

    def expected(self, prefix: str, k: int, n: int) -> dict[str, tuple[int, ...]]:
        """`X.weight` [N, K]."""
        return {f"{prefix}.weight": (n, k)}

    def optional(self, prefix: str) -> Sequence[str]:
        """Nothing."""
        return ()

    def values(self, prefix: str) -> str:
        """weight."""
        return f"{prefix}.weight"

    def dtype(self, source: TensorSource, prefix: str) -> torch.dtype:
        """fp16, whatever the model's: that of the blocks' scales."""
        return torch.float16

    def unpack(self, source: TensorSource, prefix: str) -> QuantLinear:
        """The codes and scales as stored."""
        rows, kind = cast(BlockSource, source).blocks(f"{prefix}.weight")
        linear = codes_of(rows, kind, bias_of(source, prefix))
        linear.validate(prefix)
        return linear

    def pack(self, prefix: str, linear: Linear) -> dict[str, Tensor]:
        """Always a CheckpointError."""
        raise CheckpointError(f"{prefix}: GGUF files are read, not written")

    def quantization_config(self) -> None:
        """None."""
        return None
