"""A 4-bit linear as a checkpoint packs it: its codes stay in the file's words, which stores are made from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from turbomill.convert.linear import QuantGrid

Packing = Literal["awq", "kn", "nk"]
PER_WORD = 8  # codes


@dataclass(frozen=True)
class PackedLinear:
    """Codes in int32 `words`, eight to a word: of neighbouring outputs in AWQ gemm's order ("awq", [K, N/8]),
    or of neighbouring inputs, low bits first ("kn", [K/8, N], and "nk", [N, K/8])."""

    packing: Packing
    words: Tensor
    grid: QuantGrid  # without an order

    @property
    def shape(self) -> tuple[int, int]:
        """(K, N)."""
        return self.grid.k, self.grid.scales.shape[1]

    @classmethod
    def of(cls, packing: Packing, words: Tensor, grid: QuantGrid) -> PackedLinear | None:
        """None where words hold something else beside eight codes, or rows are not in their places."""
        linear = cls(packing, words, grid)
        whole = all(size % PER_WORD == 0 for size in linear.shape)
        return linear if whole and grid.scheme.bits == 4 and grid.order is None else None
