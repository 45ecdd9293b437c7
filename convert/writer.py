"""Writes Hugging Face style checkpoints tensor by tensor, in bounded memory; whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from math import prod
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import torch
from torch import Tensor

from turbomill.convert.hf import INDEX
from turbomill.convert.safetensors_io import DTYPES, TAGS, encode_header, tensor_bytes
from turbomill.convert.staged import ResumableDirectory, StagedDirectory

MARKER = "turbomill.json"  # provenance, beside every checkpoint that this program wrote


class CheckpointWriter:
    """Use as a context manager: `add` tensors, put sidecars into `.path`; leaving it without error finishes.

    Writes config.json and model.safetensors, or shards of at most `max_shard_bytes` with an index.
    `dst` is replaced when it exists: the caller has asked the user. An exception leaves nothing behind,
    unless `staged` is a ResumableDirectory: then the same run finds again what was committed.
    """

    def __init__(
        self,
        dst: Path,
        config: Mapping[str, Any],
        max_shard_bytes: float = 5e9,
        staged: StagedDirectory | None = None,
    ) -> None:
        self.config = dict(config)
        self.max_shard_bytes = int(max_shard_bytes)
        self._staged = staged or StagedDirectory(dst)
        self.path = self._staged.temp  # where sidecars go before `finish`
        self._shards: list[dict[str, tuple[str, tuple[int, ...]]]] = []  # per shard: name -> dtype tag, shape
        self._names: set[str] = set()
        self._new: list[tuple[int, str, str, tuple[int, ...]]] = []  # since the last commit
        self._data: IO[bytes] | None = None
        self._sizes: list[int] = []  # per shard: bytes of data
        self._finished = False

    def __enter__(self) -> CheckpointWriter:
        self._staged.__enter__()
        if isinstance(self._staged, ResumableDirectory):
            self._restore(self._staged.entries)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._finished:
            return
        if kind is not None:
            if self._data is not None:
                self._data.close()
            self._staged.__exit__(kind, error, trace)
            return
        self.finish()

    def add(self, name: str, tensor: Tensor) -> None:
        """Append one tensor; its memory can be freed afterwards."""
        if name in self._names:
            raise ValueError(f"tensor {name} was already written")
        nbytes = tensor.numel() * tensor.element_size()
        if not self._shards or (self._sizes[-1] and self._sizes[-1] + nbytes > self.max_shard_bytes):
            self._next_shard()
        assert self._data is not None
        self._data.write(tensor_bytes(tensor))
        self._record(len(self._shards) - 1, name, TAGS[tensor.dtype], tuple(tensor.shape), nbytes)
        self._new.append((len(self._shards) - 1, name, TAGS[tensor.dtype], tuple(tensor.shape)))

    def names(self) -> list[str]:
        """The tensors added so far."""
        return [name for shard in self._shards for name in shard]

    def has(self, name: str) -> bool:
        """Whether a tensor was added."""
        return name in self._names

    def read(self, name: str) -> Tensor:
        """A tensor that was added, from the unfinished shard."""
        if self._data is not None:
            self._data.flush()
        index = next(i for i, shard in enumerate(self._shards) if name in shard)
        offset = 0
        for other, (tag, shape) in self._shards[index].items():
            if other == name:
                break
            offset += prod(shape) * DTYPES[tag].itemsize
        tag, shape = self._shards[index][name]
        with self._data_of(index).open("rb") as file:
            file.seek(offset)
            data = bytearray(file.read(prod(shape) * DTYPES[tag].itemsize))
        return torch.frombuffer(data, dtype=DTYPES[tag]).reshape(shape)

    def commit(self, entry: Mapping[str, Any]) -> None:
        """Record in the resumable directory that `entry` is done: the tensors since the last one."""
        assert isinstance(self._staged, ResumableDirectory)
        if self._data is not None:
            self._data.flush()
            os.fsync(self._data.fileno())
        self._staged.append({**entry, "tensors": self._new})
        self._new = []

    def finish(self) -> None:
        """Write the headers, the index and config.json, and let the directory appear."""
        try:
            self._assemble()
        except BaseException as error:
            self._staged.__exit__(type(error), error, error.__traceback__)
            raise
        self._finished = True
        self._staged.__exit__(None, None, None)

    def _assemble(self) -> None:
        if not self._shards:
            self._next_shard()
        self._close()
        count = len(self._shards)
        names = [
            "model.safetensors" if count == 1 else f"model-{i + 1:05d}-of-{count:05d}.safetensors"
            for i in range(count)
        ]
        for index, name in enumerate(names):
            self._finish_shard(index, self.path / name)
        if count > 1:
            weight_map = {t: names[i] for i, shard in enumerate(self._shards) for t in shard}
            index_json = {"metadata": {"total_size": sum(self._sizes)}, "weight_map": weight_map}
            write_json(self.path / INDEX, index_json)
        write_json(self.path / "config.json", self.config)

    def _record(self, shard: int, name: str, tag: str, shape: tuple[int, ...], nbytes: int) -> None:
        self._names.add(name)
        self._shards[shard][name] = (tag, shape)
        self._sizes[shard] += nbytes

    def _restore(self, entries: list[dict[str, Any]]) -> None:
        """Be where the last commit was: what was written after it is cut off."""
        for shard, name, tag, shape in (tensor for entry in entries for tensor in entry["tensors"]):
            while len(self._shards) <= shard:
                self._shards.append({})
                self._sizes.append(0)
            self._record(shard, name, tag, tuple(shape), prod(shape) * DTYPES[tag].itemsize)
        for index, size in enumerate(self._sizes):
            data = self._data_of(index)
            if data.is_file():  # else its shard was finished already
                os.truncate(data, size)
        if self._shards and self._data_of(len(self._shards) - 1).is_file():
            self._data = self._data_of(len(self._shards) - 1).open("ab")

    def _data_of(self, index: int) -> Path:
        return self.path / f"shard-{index}.data"

    def _next_shard(self) -> None:
        self._close()
        self._data = self._data_of(len(self._shards)).open("wb")
        self._shards.append({})
        self._sizes.append(0)

    def _close(self) -> None:
        if self._data is None:
            return
        self._data.flush()
        os.fsync(self._data.fileno())
        self._data.close()
        self._data = None

    def _finish_shard(self, index: int, file: Path) -> None:
        """Put the header, known only now, before the shard's data. A shard without data is finished."""
        data = self._data_of(index)
        if not data.is_file():
            return
        header, _ = encode_header(self._shards[index], metadata={"format": "pt"})
        with file.open("wb") as out, data.open("rb") as part:
            out.write(header)
            shutil.copyfileobj(part, out, 1 << 24)
            out.flush()
            os.fsync(out.fileno())
        data.unlink()


def write_json(path: Path, value: Any) -> None:
    """JSON, indented, in place of whatever is there."""
    temp = path.with_name(path.name + ".tmp")
    text = json.dumps(value, indent=2, ensure_ascii=False)
    if any("\ud800" <= char <= "\udfff" for char in text):  # half a character, which only an escape can hold
        text = json.dumps(value, indent=2)
    temp.write_text(text + "\n", encoding="utf-8")
    os.replace(temp, path)  # noqa: PTH105
