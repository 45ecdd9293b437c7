"""Checkpoints in fp8 with a scale for each block of a weight (DeepSeek, Qwen3-FP8), shown in bf16.

`X.weight` is float8_e4m3 [N, K], `X.weight_scale_inv` [ceil(N/bn), ceil(K/bk)] what each block is multiplied
by; config.json has `quantization_config = {quant_method: "fp8", weight_block_size: [bn, bk], ...}`. That the
published models quantize activations too is a matter of speed: here they stay in 16 bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from turbomill.convert.base import Checkpoint
from turbomill.convert.wrapped import WrappedCheckpoint
from turbomill.errors import CheckpointError, UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

FP8 = torch.float8_e4m3fn
SCALE = "_scale_inv"  # after a weight's name


def is_fp8(config: dict[str, Any]) -> bool:
    """Whether config.json says so."""
    quant = config.get("quantization_config")
    return isinstance(quant, dict) and quant.get("quant_method") == "fp8"


class Fp8Checkpoint(WrappedCheckpoint):
    """`source`, its fp8 weights dequantized when asked for; every scale was checked when it was opened."""

    def __init__(self, source: Checkpoint) -> None:
        super().__init__(source)
        self._block = _block_size(source)
        self.config = {key: value for key, value in source.config.items() if key != "quantization_config"}
        self._scaled = {name for name in source.names() if source.dtype_of(name) == FP8}
        for name in sorted(self._scaled):
            self._check(name)

    @property
    def note(self) -> str:
        """That it was fp8."""
        rows, columns = self._block
        return f"fp8 e4m3 in blocks of {rows} x {columns}, dequantized to bfloat16"

    def _check(self, name: str) -> None:
        scale, shape = name + SCALE, self.source.shape(name)
        if not self.source.has(scale):
            raise CheckpointError(f"{self.path}: {name} is fp8, but there is no {scale}")
        expected = tuple(-(-size // block) for size, block in zip(shape, self._block, strict=False))
        if len(shape) != 2 or self.source.shape(scale) != expected:
            raise CheckpointError(
                f"{self.path}: {scale} is {list(self.source.shape(scale))}, expected {list(expected)} for "
                f"{list(shape)} in blocks of {list(self._block)}"
            )

    def names(self) -> list[str]:
        """Without the scales."""
        return [name for name in self.source.names() if not self._is_scale(name)]

    def _is_scale(self, name: str) -> bool:
        return name.endswith(SCALE) and name.removesuffix(SCALE) in self._scaled

    def has(self, name: str) -> bool:
        """Whether there is a tensor, other than a scale."""
        return self.source.has(name) and not self._is_scale(name)

    def dtype_of(self, name: str) -> torch.dtype:
        """bf16 for what is stored in fp8."""
        return torch.bfloat16 if name in self._scaled else self.source.dtype_of(name)

    def tensor(self, name: str) -> Tensor:
        """One tensor; an fp8 weight in bf16, rounded once. Raises CheckpointError for NaN."""
        weight = self.source.tensor(name)
        if name not in self._scaled:
            return weight
        scale = self.source.tensor(name + SCALE).float()
        for dim, block in enumerate(self._block):
            scale = scale.repeat_interleave(block, dim).narrow(dim, 0, weight.shape[dim])
        values = (weight.float() * scale).bfloat16()
        if not bool(torch.isfinite(values).all()):
            raise CheckpointError(f"{self.path}: {name}: holds inf or NaN")
        return values

    def hf_config(self) -> PretrainedConfig:
        """Of the dense model."""
        return Checkpoint.hf_config(self)


def _block_size(source: Checkpoint) -> tuple[int, int]:
    quant = source.config["quantization_config"]
    size = quant.get("weight_block_size")
    if size is None:
        raise UnsupportedModelError(
            f"{source.path}: config.json: fp8 without weight_block_size is not supported; supported: a "
            "scale for each block, as [128, 128]"
        )
    if not (isinstance(size, list) and len(size) == 2 and all(isinstance(n, int) and n > 0 for n in size)):
        raise CheckpointError(f"{source.path}: config.json: weight_block_size {size!r}, expected [128, 128]")
    if str(quant.get("fmt", "e4m3")) not in ("e4m3", "float8_e4m3fn"):
        raise UnsupportedModelError(f"{source.path}: config.json: fp8 of fmt {quant['fmt']}; supported: e4m3")
    return size[0], size[1]
