"""What a step of the plan makes: bytes of the store, whole or piece by piece where they are written from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
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
    def fill(self, begin: int, out: memoryview) -> None:
        """Write the bytes from `begin` on, as many as `out` holds, into it."""


class Whole(Made):
    """A tensor that is in memory, or mapped."""

    unit = 1

    def __init__(self, tensor: Tensor) -> None:
        self.dtype, self.shape = tensor.dtype, tuple(tensor.shape)
        self._bytes = np.frombuffer(tensor_bytes(tensor), np.uint8)

    def fill(self, begin: int, out: memoryview) -> None:
        """A copy, by NumPy's hand: it lets other threads run."""
        np.copyto(np.frombuffer(out, np.uint8), self._bytes[begin : begin + len(out)])


class Codes(Made):
    """Codes of linears that are fused along N, `block` rows of each in turn unless it is 0, as w4.n64k64:
    straight from the words of the checkpoint, in units of a row of tiles."""

    def __init__(self, parts: Sequence[PackedLinear], block: int) -> None:
        self._parts, self._block = parts, block  # of one packing
        k, n = parts[0].grid.k, sum(part.shape[1] for part in parts)
        self.dtype = torch.uint8
        self.shape = (padded(n) // TILE, padded(k) // TILE, *tile_shape(4))
        self.unit = prod(self.shape[1:])

    def fill(self, begin: int, out: memoryview) -> None:
        """Rows of tiles."""
        first, words = self._parts[0], [part.words for part in self._parts]
        native.pack_words(first.packing, words, first.grid.k, self._block, begin // self.unit, out)
