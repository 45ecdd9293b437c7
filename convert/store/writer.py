"""Writes a plan's tensors into safetensors shards: the headers are known first, then the data streams.

Nothing waits for the disk until the end: tensors are made ahead of the one that is written, their checksums
are taken where they are made, and what has been written goes to the disk meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from isal.isal_zlib import crc32, crc32_combine

from turbomill.convert.safetensors_io import TAGS, Entry, encode_header, tensor_bytes
from turbomill.convert.store.manifest import TensorInfo, dtype_name
from turbomill.convert.store.plan import Planned, Step

PAGE = 4096
LINE = 64
MAKERS = 2  # threads that make tensors while others are written
SHARD_BYTES = 1 << 30
FLUSH_BYTES = 1 << 27  # so many bytes after another go to the disk


@dataclass(frozen=True)
class _Piece:
    """One expert's part of a tensor, or the whole of it."""

    planned: Planned
    expert: int
    data: memoryview
    checksum: int


def write_shards(
    directory: Path, steps: Sequence[Step], done: Callable[[int], None], shard_bytes: int = SHARD_BYTES
) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Write every tensor; `done(nbytes)` after each. Returns where each lies, and the shards' checksums.

    All is on the disk then. Memory: the tensors of MAKERS + 1 steps, as some are made while the one before
    them is written.
    """
    shards = _split(steps, shard_bytes)
    infos: dict[str, TensorInfo] = {}
    sums: dict[str, str] = {}
    with ThreadPoolExecutor(1) as flushing:
        for index, shard in enumerate(shards):
            file = f"weights-{index + 1:05d}-of-{len(shards):05d}.safetensors"
            tensors = [planned for step in shard for planned in step.tensors]
            header, entries = encode_header({t.name: (t.tag, t.shape) for t in _aligned(tensors)}, align=PAGE)
            infos.update({t.name: _info(t, file, entries[t.name]) for t in tensors})
            with _Shard(directory / file, header, flushing) as out:
                for piece in _made_ahead(shard):
                    begin = entries[piece.planned.name].offset + piece.expert * len(piece.data)
                    out.write(begin, piece.data, piece.checksum)
                    done(len(piece.data))
            sums[file] = out.checksum()
    return infos, sums


class _Shard:
    """A file that is written in any order; it is on the disk when the context is left."""

    def __init__(self, path: Path, header: bytes, flushing: ThreadPoolExecutor) -> None:
        self._file: IO[bytes] = path.open("wb")
        self._flushing = flushing
        self._flushed: Future[None] | None = None
        self._unflushed = 0
        self._sums: dict[int, tuple[int, int]] = {}  # offset -> checksum and length
        self.write(0, header, crc32(header))

    def write(self, offset: int, data: bytes | memoryview, checksum: int) -> None:
        self._file.seek(offset)
        self._file.write(data)
        self._sums[offset] = checksum, len(data)
        self._unflushed += len(data)
        if self._unflushed >= FLUSH_BYTES and (self._flushed is None or self._flushed.done()):
            self._flush()

    def _flush(self) -> None:
        self._wait()
        self._file.flush()
        self._unflushed = 0
        self._flushed = self._flushing.submit(os.fdatasync, self._file.fileno())

    def _wait(self) -> None:
        if self._flushed is not None:
            self._flushed.result()

    def checksum(self) -> str:
        """Of the file, from its parts'."""
        value = end = 0
        for offset, (part, length) in sorted(self._sums.items()):
            if offset != end and length:
                raise AssertionError(f"{self._file.name}: nothing was written from {end} to {offset}")
            value, end = crc32_combine(value, part, length), end + length
        return f"{value:08x}"

    def __enter__(self) -> _Shard:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if kind is None:
                self._flush()
            self._wait()
        finally:
            self._file.close()


def _made_ahead(steps: Sequence[Step]) -> Iterator[_Piece]:
    """Each step's tensors, expert by expert; the next are being made while the last are used."""
    parts = [(step, expert) for step in steps for expert in range(max(step.experts, 1))]
    with ThreadPoolExecutor(MAKERS) as making:
        ahead: list[Future[list[_Piece]]] = []
        for index in range(len(parts)):
            while len(ahead) <= MAKERS and index + len(ahead) < len(parts):
                ahead.append(making.submit(_make, *parts[index + len(ahead)]))
            yield from ahead.pop(0).result()


def _make(step: Step, expert: int) -> list[_Piece]:
    pieces = []
    for planned, tensor in zip(step.tensors, step.build(expert), strict=True):
        shape = planned.shape[1:] if step.experts else planned.shape
        if TAGS[tensor.dtype] != planned.tag or tuple(tensor.shape) != shape:
            raise AssertionError(
                f"{planned.name}: built {tensor.dtype} {list(tensor.shape)}, planned {planned.tag} "
                f"{list(shape)}"
            )
        data = tensor_bytes(tensor)
        pieces.append(_Piece(planned, expert, data, crc32(data)))
    return pieces


def _split(steps: Sequence[Step], limit: int) -> list[list[Step]]:
    """Consecutive steps, at most `limit` bytes to a shard unless one step alone is larger."""
    shards: list[list[Step]] = [[]]
    size = 0
    for step in steps:
        nbytes = sum(planned.nbytes for planned in step.tensors)
        if shards[-1] and size + nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(step)
        size += nbytes
    return shards


def _aligned(tensors: Sequence[Planned]) -> list[Planned]:
    """Sizes of whole cache lines first, so that those tensors start on one; then by element size."""
    return sorted(
        tensors, key=lambda t: (t.nbytes % LINE != 0, -(t.nbytes & -t.nbytes) if t.nbytes % LINE else 0)
    )


def _info(planned: Planned, file: str, entry: Entry) -> TensorInfo:
    return TensorInfo(
        layout=planned.layout,
        dtype=dtype_name(planned.tag),
        shape=list(planned.shape),
        logical=list(planned.logical),
        group=planned.group,
        file=file,
        offset=entry.offset,
        nbytes=entry.nbytes,
    )


def checksum(path: Path) -> str:
    """CRC-32 of a whole file, as eight hex digits: faster than the disk, and enough against accidents."""
    value, block = 0, memoryview(bytearray(1 << 22))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            value = crc32(block[:count], value)
    return f"{value:08x}"
