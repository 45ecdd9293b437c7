"""Opening a checkpoint of any kind."""

from __future__ import annotations

from pathlib import Path

from turbomill.convert.base import Checkpoint
from turbomill.convert.gguf import GgufCheckpoint
from turbomill.convert.hf import HfCheckpoint
from turbomill.convert.source import kind_of, resolve_model
from turbomill.convert.wrapped import WrappedCheckpoint
from turbomill.errors import CheckpointError

__all__ = ["Checkpoint", "open_checkpoint", "open_dense"]


def open_checkpoint(model: str | Path) -> Checkpoint:
    """Open MODEL (a Hugging Face directory, a GGUF file, a hub name or `demo`) and check its headers.

    Raises CheckpointError, in one line that names the file and the tensor.
    """
    path = resolve_model(model)
    kind = kind_of(path)
    if kind == "store":
        raise CheckpointError(f"{path}: this is a store; give the checkpoint it was made from")
    return GgufCheckpoint(path) if kind == "gguf" else HfCheckpoint(path)


def open_dense(model: str | Path) -> Checkpoint:
    """The same, with the codes of a GGUF file's linears as the 16-bit numbers they stand for.

    A GGUF file is often all there is of a model: what needs weights takes them from it.
    """
    checkpoint = open_checkpoint(model)
    return WrappedCheckpoint(checkpoint) if isinstance(checkpoint, GgufCheckpoint) else checkpoint
