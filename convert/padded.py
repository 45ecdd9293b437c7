"""A checkpoint whose MLPs are padded with zeros, so that a group, or ranks, divide their inner size.

Rows of zeros in gate and up give zeros, which meet columns of zeros in down: no result changes. The padded
size stands in the config, so that every reader agrees (Qwen published 29568 as 29696 in this way).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from turbomill.convert.base import Checkpoint
from turbomill.convert.formats.base import WeightFormat
from turbomill.convert.formats.packed import PackedLinear
from turbomill.convert.linear import DenseLinear, Linear, QuantLinear
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
    """`source` with larger inner sizes, those of `padded_sizes`. Quantized linears are padded too: new
    outputs have a scale of zero, new inputs are zero."""

    def __init__(self, source: Checkpoint, sizes: HfConfig) -> None:
        super().__init__(source)
        self.sizes = sizes
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

    def format_of(self, prefix: str) -> WeightFormat:
        """The source's."""
        return self.source.format_of(prefix)

    def linear(self, prefix: str) -> Linear:
        """Padded."""
        linear, weight = self.source.linear(prefix), f"{prefix}.weight"
        if weight not in self._shapes:
            return linear
        n, k = self._shapes[weight]
        if isinstance(linear, DenseLinear):
            bias = None if linear.bias is None else self.tensor(f"{prefix}.bias")
            return DenseLinear(self.tensor(weight), bias)
        if weight not in self._halves:
            return _grown_linear(linear, k, n)
        return _side_by_side([_grown_linear(linear.columns(half), k, n // 2) for half in _two_halves(linear)])

    def packed(self, prefix: str) -> PackedLinear | None:
        """The source's, where nothing is added to it."""
        return None if f"{prefix}.weight" in self._shapes else self.source.packed(prefix)

    def hf_config(self) -> PretrainedConfig:
        """Of the padded sizes."""
        return Checkpoint.hf_config(self)


def _two_halves(linear: QuantLinear) -> tuple[slice, slice]:
    middle = linear.shape[1] // 2
    return slice(0, middle), slice(middle, None)


def _side_by_side(parts: list[QuantLinear]) -> QuantLinear:
    """One linear of the outputs of several."""

    def joined(name: str, dim: int) -> Tensor | None:
        values = [getattr(part, name) for part in parts]
        return None if values[0] is None else torch.cat(values, dim)

    fields = {name: joined(name, 1) for name in ("codes", "scales", "zeros", "mins")}
    return replace(parts[0], **fields, bias=joined("bias", 0))


def _grown_linear(linear: QuantLinear, k: int, n: int) -> QuantLinear:
    """The linear with rows and columns that stand for zeros, as far as the group of each row lets them."""
    old_k, old_n = linear.shape
    # One group that spans K still does.
    spans = linear.scheme.group >= old_k
    scheme = replace(linear.scheme, group=k) if spans else linear.scheme
    groups = -(-k // scheme.group)
    middle = 2 ** (scheme.bits - 1) if scheme.symmetric else 0
    zeros = linear.zeros.new_full((groups, n), middle)
    zeros[: linear.zeros.shape[0], :old_n] = linear.zeros
    codes = zeros[torch.arange(k) // scheme.group]  # [K, N]: a code that equals its zero stands for 0
    codes[:old_k, :old_n] = linear.codes
    order = linear.order
    if order is not None:
        order = torch.cat([order, torch.arange(old_k, k, dtype=order.dtype)])
    return QuantLinear(
        codes=codes,
        scales=_grown(linear.scales, (groups, n)),
        zeros=zeros,
        scheme=scheme,
        bias=None if linear.bias is None else _grown(linear.bias, (n,)),
        mins=None if linear.mins is None else _grown(linear.mins, (groups, n)),
        order=order,
    )


def _grown(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """`tensor` in the corner of a tensor of zeros."""
    grown = tensor.new_zeros(shape)
    grown[tuple(slice(size) for size in tensor.shape)] = tensor
    return grown
