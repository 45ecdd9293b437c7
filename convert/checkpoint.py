"""Opening a checkpoint of any kind."""

from __future__ import annotations

from pathlib import Path

from turbomill.convert.base import Checkpoint
from turbomill.convert.gguf import GgufCheckpoint
from turbomill.convert.hf import HfCheckpoint
from turbomill.convert.source import kind_of, resolve_model
from turbomill.errors import CheckpointError

__all__ = ["Checkpoint", "open_checkpoint"]


def open_checkpoint(model: str | Path) -> Checkpoint:
    """Open MODEL (a Hugging Face directory, a GGUF file, a hub name or `demo`) and check its headers.

    Raises CheckpointError, in one line that names the file and the tensor.
    """
    path = resolve_model(model)
    kind = kind_of(path)
    if kind == "store":
        raise CheckpointError(f"{path}: this is a store; give the checkpoint it was made from")
    return GgufCheckpoint(path) if kind == "gguf" else HfCheckpoint(path)
