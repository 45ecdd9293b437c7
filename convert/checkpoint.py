"""Opening a checkpoint of any kind."""

from __future__ import annotations

from pathlib import Path

from turbomill.convert.base import Checkpoint
from turbomill.convert.fp8 import Fp8Checkpoint, is_fp8
from turbomill.convert.gguf import DequantizedGguf, GgufCheckpoint
from turbomill.convert.hf import HfCheckpoint
from turbomill.convert.pickled import PickledCheckpoint, has_pickles_only
from turbomill.convert.source import kind_of, resolve_model
from turbomill.errors import CheckpointError

__all__ = ["Checkpoint", "open_checkpoint", "open_dense"]


def open_checkpoint(model: str | Path, allow_pickle: bool = False) -> Checkpoint:
    """Open MODEL (a Hugging Face directory, a GGUF file, a hub name or `demo`) and check its headers.

    `allow_pickle` reads pytorch_model.bin where there is nothing else. Raises CheckpointError, in one line
    that names the file and the tensor.
    """
    path = resolve_model(model)
    kind = kind_of(path)
    if kind == "store":
        raise CheckpointError(f"{path}: this is a store; give the checkpoint it was made from")
    if kind == "gguf":
        return GgufCheckpoint(path)
    pickled = allow_pickle and has_pickles_only(path)
    checkpoint = PickledCheckpoint(path) if pickled else HfCheckpoint(path)
    return Fp8Checkpoint(checkpoint) if is_fp8(checkpoint.config) else checkpoint


def open_dense(model: str | Path, allow_pickle: bool = False) -> Checkpoint:
    """The same, with the codes of a GGUF file's linears as the 16-bit numbers they stand for.

    A GGUF file is often all there is of a model: what needs weights takes them from it.
    """
    checkpoint = open_checkpoint(model, allow_pickle)
    return DequantizedGguf(checkpoint) if isinstance(checkpoint, GgufCheckpoint) else checkpoint
