"""Writes a plan's tensors into safetensors shards: the headers are known first, then the data streams."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from torch import Tensor

from turbomill.convert.safetensors_io import TAGS, Entry, encode_header, tensor_bytes
from turbomill.convert.store.manifest import TensorInfo, dtype_name
from turbomill.convert.store.plan import Planned, Step

PAGE = 4096
LINE = 64
MAKERS = 2  # threads that make tensors while others are written
SHARD_BYTES = 1 << 30  # a shard's checksum is taken, from the page cache, while the next one is written


def write_shards(
    directory: Path, steps: Sequence[Step], done: Callable[[int], None], shard_bytes: int = SHARD_BYTES
) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Write every tensor; `done(nbytes)` after each. Returns where each lies, and the shards' checksums.

    Memory: the tensors of MAKERS + 1 steps, as some are made while the one before them is written.
    """
    shards = _split(steps, shard_bytes)
    infos: dict[str, TensorInfo] = {}
    sums: dict[str, Future[str]] = {}
    with ThreadPoolExecutor(1) as checking:
        for index, shard in enumerate(shards):
            file = f"weights-{index + 1:05d}-of-{len(shards):05d}.safetensors"
            tensors = [planned for step in shard for planned in step.tensors]
            header, entries = encode_header({t.name: (t.tag, t.shape) for t in _aligned(tensors)}, align=PAGE)
            infos.update({t.name: _info(t, file, entries[t.name]) for t in tensors})
            with (directory / file).open("wb") as out:
                out.write(header)
                for step, expert, built in _made_ahead(shard):
                    for planned, tensor in zip(step.tensors, built, strict=True):
                        shape = planned.shape[1:] if step.experts else planned.shape
                        if TAGS[tensor.dtype] != planned.tag or tuple(tensor.shape) != shape:
                            raise AssertionError(
                                f"{planned.name}: built {tensor.dtype} {list(tensor.shape)}, planned "
                                f"{planned.tag} {list(shape)}"
                            )
                        nbytes = planned.nbytes // max(step.experts, 1)
                        out.seek(entries[planned.name].offset + expert * nbytes)
                        out.write(tensor_bytes(tensor))
                        done(nbytes)
            sums[file] = checking.submit(checksum, directory / file)
        return infos, {file: found.result() for file, found in sums.items()}


def _made_ahead(steps: Sequence[Step]) -> Iterator[tuple[Step, int, list[Tensor]]]:
    """Each step's tensors, expert by expert; the next are being made while the last are used."""
    pieces = [(step, expert) for step in steps for expert in range(max(step.experts, 1))]
    with ThreadPoolExecutor(MAKERS) as making:
        ahead: list[Future[list[Tensor]]] = []
        for index, (step, expert) in enumerate(pieces):
            while len(ahead) <= MAKERS and index + len(ahead) < len(pieces):
                following, part = pieces[index + len(ahead)]
                ahead.append(making.submit(following.build, part))
            yield step, expert, ahead.pop(0).result()


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
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            value = zlib.crc32(block, value)
    return f"{value:08x}"
