"""What makes a quantization run the same run, and the model that an unfinished one has written so far.

Finished layers are in the staged directory. The hidden states behind them are computed again, from what was
written: that takes one forward pass a layer, no disk, and gives the bits of the unbroken run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from turbomill import console
from turbomill.convert.checkpoint import Checkpoint
from turbomill.convert.formats.base import WeightFormat
from turbomill.convert.runnable import RunnableCheckpoint
from turbomill.convert.wrapped import WrappedCheckpoint
from turbomill.convert.writer import CheckpointWriter
from turbomill.errors import CheckpointError
from turbomill.quant.options import Method, QuantOptions

VERSIONS = ("turbomill", "torch", "transformers")


def identity(
    checkpoint: Checkpoint, method: Method, form: str, options: QuantOptions, device: torch.device
) -> dict[str, Any]:
    """All that decides the result, calibration data apart: name -> value, names as a message shows them."""
    given = {f"option {name}": value for name, value in options.describe().items() if name != "device"}
    return {
        "model": checkpoint.fingerprint,
        "method": method,
        "format": form,
        **given,
        "option max_shard_bytes": options.max_shard_bytes,
        "device": str(device),
        **{f"version of {name}": console.versions()[name] for name in VERSIONS},
    }


class WrittenModel(WrappedCheckpoint):
    """The tensors that a CheckpointWriter has taken so far, read from its unfinished shards."""

    def __init__(self, source: Checkpoint, writer: CheckpointWriter, form: WeightFormat) -> None:
        super().__init__(source)
        self.path = writer.path
        self.format = form  # type: ignore[misc]
        self._writer = writer

    def names(self) -> list[str]:
        """Those written."""
        return self._writer.names()

    def has(self, name: str) -> bool:
        """Whether it was written."""
        return self._writer.has(name)

    def tensor(self, name: str) -> Tensor:
        """Read from the shard's data."""
        if not self._writer.has(name):
            raise CheckpointError(f"{self.path}: {name} was not written; pass --overwrite to start anew")
        return self._writer.read(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """As written."""
        return tuple(self.tensor(name).shape)

    def dtype_of(self, name: str) -> torch.dtype:
        """As written."""
        return self.tensor(name).dtype

    def stored(self, name: str) -> tuple[tuple[int, ...], str, str, int]:
        """As written."""
        tensor = self.tensor(name)
        return tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), "row-major", tensor.nbytes


def written_model(model: RunnableCheckpoint, writer: CheckpointWriter, form: WeightFormat) -> Checkpoint:
    """What was written, under the names of the code that runs it."""
    return RunnableCheckpoint(WrittenModel(model.published, writer, form), model.runs_as)
