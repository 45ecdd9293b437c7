"""Old checkpoints: pytorch_model.bin, one or several with an index, read only when the user asked for it.

torch reads them with `weights_only`, which runs no code of the file's; that a pickle is the wrong thing to
trust remains true, hence the option.
"""

from __future__ import annotations

import pickle
from pathlib import Path

import torch
from torch import Tensor

from turbomill.convert.base import missing
from turbomill.convert.hf import HfCheckpoint, read_json
from turbomill.convert.safetensors_io import TAGS
from turbomill.errors import CheckpointError

WEIGHTS, INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


def has_pickles_only(path: Path) -> bool:
    """Whether the weights of the directory `path` are such files and no others."""
    return not any(path.glob("*.safetensors")) and any((path / name).is_file() for name in (WEIGHTS, INDEX))


class PickledCheckpoint(HfCheckpoint):
    """A directory with config.json and pickled weights, mapped where they are zip files."""

    def _open_weights(self) -> None:
        self._tensors: dict[str, Tensor] = {}
        self._files = self._found()
        for file in self._files:
            for name, tensor in _load(file).items():
                if not isinstance(tensor, Tensor) or tensor.dtype not in TAGS:
                    raise CheckpointError(f"{file}: {name} is not a tensor of a dtype that is known")
                if name in self._tensors:
                    raise CheckpointError(f"{file}: tensor {name} is also in another of the files")
                self._tensors[name] = tensor

    def _found(self) -> list[Path]:
        if (self.path / WEIGHTS).is_file():
            return [self.path / WEIGHTS]
        weight_map = read_json(self.path / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
            raise CheckpointError(f"{self.path / INDEX}: no weight_map of tensor names to file names")
        files = [self.path / name for name in sorted(set(weight_map.values()))]
        for file in files:
            if not file.is_file():
                raise CheckpointError(f"{file}: missing, though {INDEX} names it; download it again")
        return files

    def names(self) -> list[str]:
        """Every tensor's name, file by file."""
        return list(self._tensors)

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name."""
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """Its shape."""
        return tuple(self.tensor(name).shape)

    def dtype_of(self, name: str) -> torch.dtype:
        """Its dtype."""
        return self.tensor(name).dtype

    def stored(self, name: str) -> tuple[tuple[int, ...], str, str, int]:
        """As saved."""
        found = self.tensor(name)
        return tuple(found.shape), str(found.dtype).removeprefix("torch."), "pickled", found.nbytes

    def tensor(self, name: str) -> Tensor:
        """One tensor; do not write into it."""
        if name not in self._tensors:
            raise missing(self.path, name, self._tensors)
        return self._tensors[name].contiguous()

    def release(self) -> None:
        """Nothing: torch maps the files."""


def _load(file: Path) -> dict[str, object]:
    try:
        try:
            found = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # saved before torch 1.6, which cannot be mapped
            found = torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise CheckpointError(f"{file}: not tensors alone, or damaged: {reason[:200]}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{file}: holds no tensors by name")
    return found
