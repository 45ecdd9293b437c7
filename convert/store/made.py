"""What a step of the plan makes: bytes of the store, whole or piece by piece where they are written from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor

from turbomill.convert import native
from turbomill.convert.formats.packed import PackedLinear
from turbomill.convert.safetensors_io import tensor_bytes
from turbomill.convert.store.layout import TILE, padded, tile_shape


class Made(ABC):
    """A tensor for the store. `unit` bytes of it belong together: pieces are of whole units, or the last."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    unit: int

    @property
    def nbytes(self) -> int:
        """Of all of it."""
        return prod(self.shape) * self.dtype.itemsize

    @abstractmethod
    def fill(self, begin: int, out: np.ndarray) -> None:
        """Write the bytes from `begin` on, as many as uint8 `out` [n] holds, into it."""


class Whole(Made):
    """A tensor that is in memory, or mapped."""

    unit = 1

    def __init__(self, tensor: Tensor) -> None:
        self.dtype, self.shape = tensor.dtype, tuple(tensor.shape)
        self._bytes = np.frombuffer(tensor_bytes(tensor), np.uint8)

    def fill(self, begin: int, out: np.ndarray) -> None:
        """A copy."""
        np.copyto(out, self._bytes[begin : begin + out.size])


@dataclass(frozen=True)
class Codes(Made):
    """Codes of linears that are fused along N, `block` rows of each in turn unless it is 0, as w4.n64k64: straight
    from the words of the checkpoint, in units of a row of tiles."""

    parts: Sequence[PackedLinear]  # of one packing
    block: int
    dtype = torch.uint8

    @property
    def shape(self) -> tuple[int, ...]:
        """[Np/64, Kp/64, 4, 32, 16]."""
        k, n = self.parts[0].grid.k, sum(part.shape[1] for part in self.parts)
        return padded(n) // TILE, padded(k) // TILE, *tile_shape(4)

    @property
    def unit(self) -> int:
        """A row of tiles."""
        return prod(self.shape[1:])

    def fill(self, begin: int, out: np.ndarray) -> None:
        """Rows of tiles."""
        first, words = self.parts[0], [part.words for part in self.parts]
        native.pack_words(first.packing, words, first.grid.k, self.block, begin // self.unit, out)


def codes_in_words(parts: Sequence[PackedLinear], block: int) -> Codes | None:
    """The codes of linears that are fused, or None where they must be unpacked to meet."""
    if len({part.packing for part in parts}) != 1 or not native.available():
        return None
    return Codes(parts, block if len(parts) > 1 else 0)
