"""A GGUF file's metadata under its architecture's prefix."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turbomill.errors import CheckpointError, UnsupportedModelError


@dataclass(frozen=True)
class Metadata:
    """`get("block_count")` is the value of `llama.block_count` in a file of architecture llama."""

    path: Path
    arch: str
    fields: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]  # of the file's tensors, by their names there

    def get(self, key: str, default: Any = None) -> Any:
        """A value, or the default."""
        return self.fields.get(f"{self.arch}.{key}", default)

    def whole(self, key: str, default: int | None = None) -> int:
        """A positive whole number. Raises CheckpointError when it is missing and there is no default."""
        value = self.get(key, default)
        if isinstance(value, list):
            raise UnsupportedModelError(
                f"{self.path}: {self.arch}.{key} differs between layers, which is not supported"
            )
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            state = "missing" if value is None else f"{value!r}, expected a positive whole number"
            raise CheckpointError(f"{self.path}: metadata {self.arch}.{key} is {state}")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """A number, likewise."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            state = "missing" if value is None else f"{value!r}, expected a number"
            raise CheckpointError(f"{self.path}: metadata {self.arch}.{key} is {state}")
        return float(value)

    def has(self, tensor: str) -> bool:
        """Whether the file has a tensor of this GGUF name."""
        return tensor in self.shapes

    @property
    def heads(self) -> tuple[int, int, int]:
        """(Nq, Nkv, D)."""
        heads = self.whole("attention.head_count")
        dim = self.whole("attention.key_length", max(1, self.whole("embedding_length") // heads))
        if self.whole("attention.value_length", dim) != dim:
            raise UnsupportedModelError(
                f"{self.path}: keys and values of different lengths are not supported"
            )
        return heads, self.whole("attention.head_count_kv", heads), dim
