"""Writes Hugging Face style checkpoints tensor by tensor, in bounded memory; whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from torch import Tensor

from turbomill.convert.hf import INDEX
from turbomill.convert.safetensors_io import TAGS, encode_header, tensor_bytes
from turbomill.errors import UsageError


class StagedDirectory:
    """A directory that appears under its name only when complete. Use as a context manager.

    Work happens in a sibling named `.NAME.partial`; one left by a killed run is removed first.
    """

    def __init__(self, dst: Path) -> None:
        self.dst = Path(dst).absolute()
        self.temp = self.dst.parent / f".{self.dst.name}.partial"

    def __enter__(self) -> Path:
        try:
            self.dst.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(self.temp, ignore_errors=True)
            self.temp.mkdir()
        except OSError as error:
            raise UsageError(f"{self.dst}: cannot be written: {error.strerror or error}") from error
        return self.temp

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            shutil.rmtree(self.temp, ignore_errors=True)
            return
        # An old directory steps aside first, so that what stands under the name is always whole.
        old = self.dst.parent / f".{self.dst.name}.old"
        shutil.rmtree(old, ignore_errors=True)
        if self.dst.exists():
            self.dst.replace(old)
        self.temp.replace(self.dst)
        shutil.rmtree(old, ignore_errors=True)


class CheckpointWriter:
    """Use as a context manager: `add` tensors, put sidecars into `.path`; leaving it without error finishes.

    Writes config.json and model.safetensors, or shards of at most `max_shard_bytes` with an index.
    `dst` is replaced when it exists: the caller has asked the user. An exception leaves nothing behind.
    """

    def __init__(self, dst: Path, config: Mapping[str, Any], max_shard_bytes: float = 5e9) -> None:
        self.config = dict(config)
        self.max_shard_bytes = int(max_shard_bytes)
        self._staged = StagedDirectory(dst)
        self.path = self._staged.temp  # where sidecars go before `finish`
        self._shards: list[dict[str, tuple[str, tuple[int, ...]]]] = []  # per shard: name -> dtype tag, shape
        self._names: set[str] = set()
        self._data: IO[bytes] | None = None
        self._size = self._total = 0
        self._finished = False

    def __enter__(self) -> CheckpointWriter:
        self._staged.__enter__()
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
        if self._data is None or (self._size and self._size + nbytes > self.max_shard_bytes):
            self._next_shard()
        assert self._data is not None
        self._data.write(tensor_bytes(tensor))
        self._names.add(name)
        self._shards[-1][name] = (TAGS[tensor.dtype], tuple(tensor.shape))
        self._size += nbytes
        self._total += nbytes

    def finish(self) -> None:
        """Write the headers, the index and config.json, and let the directory appear."""
        if self._data is None:
            self._next_shard()
        self._close_shard()
        count = len(self._shards)
        names = [
            "model.safetensors" if count == 1 else f"model-{i + 1:05d}-of-{count:05d}.safetensors"
            for i in range(count)
        ]
        for index, name in enumerate(names):
            self._part(index, ".safetensors").replace(self.path / name)
        if count > 1:
            weight_map = {t: names[i] for i, shard in enumerate(self._shards) for t in shard}
            index_json = {"metadata": {"total_size": self._total}, "weight_map": weight_map}
            write_json(self.path / INDEX, index_json)
        write_json(self.path / "config.json", self.config)
        self._finished = True
        self._staged.__exit__(None, None, None)

    def _part(self, index: int, suffix: str) -> Path:
        return self.path / f"shard-{index}{suffix}"

    def _next_shard(self) -> None:
        self._close_shard()
        self._data = self._part(len(self._shards), ".data").open("wb")
        self._shards.append({})
        self._size = 0

    def _close_shard(self) -> None:
        """Put the header, known only now, before the shard's data."""
        if self._data is None:
            return
        self._data.close()
        self._data = None
        index = len(self._shards) - 1
        header, _ = encode_header(self._shards[index], metadata={"format": "pt"})
        data = self._part(index, ".data")
        with self._part(index, ".safetensors").open("wb") as out, data.open("rb") as part:
            out.write(header)
            shutil.copyfileobj(part, out, 1 << 24)
        data.unlink()


def write_json(path: Path, value: Any) -> None:
    """JSON, indented, in place of whatever is there."""
    temp = path.with_name(path.name + ".tmp")
    temp.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(temp, path)  # noqa: PTH105
