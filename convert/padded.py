"""A checkpoint whose MLPs are padded with zeros, so that a group size divides their inner size.

Rows of zeros in gate and up give zeros, which meet columns of zeros in down: no result changes. The padded
size stands in the config, so that every reader agrees (Qwen published 29568 as 29696 in this way).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from turbomill.convert.base import Checkpoint
from turbomill.convert.models.base import HfConfig
from turbomill.convert.wrapped import WrappedCheckpoint

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SIZES = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")


def padded_sizes(config: HfConfig, multiple: int) -> HfConfig:
    """The inner sizes that are not multiples, and what they become."""
    found = {key: config[key] for key in SIZES if isinstance(config.get(key), int)}
    return {key: -(-size // multiple) * multiple for key, size in found.items() if size % multiple}


class PaddedCheckpoint(WrappedCheckpoint):
    """`source`, dense, with inner sizes rounded up to multiples of `multiple`."""

    def __init__(self, source: Checkpoint, multiple: int) -> None:
        super().__init__(source)
        self.sizes = padded_sizes(source.config, multiple)
        self.config = {**source.config, **self.sizes}
        self._shapes: dict[str, tuple[int, ...]] = {}  # of what is padded
        self._halves: set[str] = set()  # gate and up in one: each is padded
        old, new = source.arch.linear_shapes(source.config), self.arch.linear_shapes(self.config)
        doubles = {(2 * source.config[key], 2 * size) for key, size in self.sizes.items()}
        for index in range(self.arch.num_layers(self.config)):
            for linear in self.arch.linears_of(self.config, index):
                if old[linear] == new[linear]:
                    continue
                k, n = new[linear]
                prefix = f"{self.arch.layer(index)}{linear}"
                self._shapes |= {f"{prefix}.weight": (n, k), f"{prefix}.bias": (n,)}
                if (old[linear][1], n) in doubles:
                    self._halves |= {f"{prefix}.weight", f"{prefix}.bias"}

    def shape(self, name: str) -> tuple[int, ...]:
        """Padded."""
        return self._shapes[name] if name in self._shapes else self.source.shape(name)

    def tensor(self, name: str) -> Tensor:
        """Padded with zeros at the end of its rows and columns, or of those of each half."""
        tensor = self.source.tensor(name)
        if name not in self._shapes:
            return tensor
        shape = self._shapes[name]
        if name not in self._halves:
            return _grown(tensor, shape)
        half = (shape[0] // 2, *shape[1:])
        return torch.cat([_grown(part, half) for part in tensor.chunk(2)])

    def hf_config(self) -> PretrainedConfig:
        """Of the padded sizes."""
        return Checkpoint.hf_config(self)


def _grown(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """`tensor` in the corner of a tensor of zeros."""
    grown = tensor.new_zeros(shape)
    grown[tuple(slice(size) for size in tensor.shape)] = tensor
    return grown
