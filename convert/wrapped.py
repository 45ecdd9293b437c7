"""A checkpoint that shows another one differently: what it does not change, it passes on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from turbomill.convert.base import Checkpoint

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


class WrappedCheckpoint(Checkpoint):
    """`source`, as it is."""

    def __init__(self, source: Checkpoint) -> None:
        self.source = source
        self.path, self.config = source.path, source.config

    @property
    def note(self) -> str:
        """The source's."""
        return self.source.note

    def names(self) -> list[str]:
        """The source's."""
        return self.source.names()

    def has(self, name: str) -> bool:
        """The source's."""
        return self.source.has(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """The source's."""
        return self.source.shape(name)

    def dtype_of(self, name: str) -> torch.dtype:
        """The source's."""
        return self.source.dtype_of(name)

    def stored(self, name: str) -> tuple[tuple[int, ...], str, str, int]:
        """The source's."""
        return self.source.stored(name)

    def tensor(self, name: str) -> Tensor:
        """The source's."""
        return self.source.tensor(name)

    def release(self) -> None:
        """The source's."""
        self.source.release()

    def hf_config(self) -> PretrainedConfig:
        """The source's."""
        return self.source.hf_config()

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The source's."""
        return self.source.tokenizer()

    @property
    def has_tokenizer(self) -> bool:
        """The source's."""
        return self.source.has_tokenizer

    def generation_config(self) -> dict[str, Any]:
        """The source's."""
        return self.source.generation_config()

    def copy_sidecars(self, dst: Path) -> None:
        """The source's."""
        self.source.copy_sidecars(dst)

    def weight_files(self) -> list[Path]:
        """The source's."""
        return self.source.weight_files()
