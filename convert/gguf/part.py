"""Where in a GGUF file a tensor of a Hugging Face name is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from turbomill.convert.gguf.container import GgufTensor


@dataclass(frozen=True)
class Part:
    """What of a file's tensor has a Hugging Face name: all of it, an expert, or some rows."""

    tensor: GgufTensor
    expert: int | None = None
    rows: slice | None = None
    heads: int = 0  # whose halves lie interleaved
    offset: float = 0.0  # was added
    matrix: bool = False  # stored as a vector

    @property
    def shape(self) -> tuple[int, ...]:
        """In Hugging Face's terms."""
        shape = self.tensor.shape if self.expert is None else self.tensor.shape[1:]
        if self.rows is not None:
            shape = (self.rows.stop - self.rows.start, *shape[1:])
        return (1, *shape) if self.matrix and len(shape) == 1 else shape

    def bytes(self) -> np.ndarray:
        """uint8 [..., bytes of a row] in Hugging Face's order of rows."""
        raw = self.tensor.rows()
        raw = raw if self.expert is None else raw[self.expert]
        if raw.ndim == 1 and (self.rows is not None or self.heads):  # a bias: its numbers are its rows
            raw = raw.reshape(self.tensor.shape[0], -1)
        raw = raw if self.rows is None else raw[self.rows]
        if self.heads:
            pairs = raw.reshape(self.heads, raw.shape[0] // self.heads // 2, 2, raw.shape[1])
            raw = pairs.swapaxes(1, 2).reshape(raw.shape)
        return raw
