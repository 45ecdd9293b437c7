"""Writes a plan's tensors into safetensors shards: the headers are known first, then the data streams.

Some threads read what the next steps hold, others make pieces of the file of it, take their checksums while
they are in the processor's cache, and write them: while some wait for the disk, others work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from isal.isal_zlib import crc32

from turbomill.convert.safetensors_io import TAGS, Entry, encode_header
from turbomill.convert.store.made import Made
from turbomill.convert.store.manifest import TensorInfo, dtype_name
from turbomill.convert.store.plan import Planned, Step
from turbomill.convert.store.shard import PAGE, PIECE, Buffers, Shard

LINE = 64
MAKERS = 2  # threads that make tensors while others are written
WRITERS = 4  # threads that write pieces of them: while one waits for the disk, others make
SHARD_BYTES = 1 << 30


@dataclass(frozen=True)
class _Part:
    """One expert's part of a tensor, or the whole of it."""

    planned: Planned
    expert: int
    made: Made


def write_shards(
    directory: Path, steps: Sequence[Step], done: Callable[[int], None], shard_bytes: int = SHARD_BYTES
) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Write every tensor; `done(nbytes)` after each piece. Returns where each lies, and shards' checksums.

    All is on the disk then. Memory: what MAKERS + 1 steps make, and WRITERS pieces.
    """
    shards = _split(steps, shard_bytes)
    infos: dict[str, TensorInfo] = {}
    sums: dict[str, str] = {}
    buffers = Buffers(WRITERS)
    with ThreadPoolExecutor(WRITERS) as writing:
        for index, shard in enumerate(shards):
            file = f"weights-{index + 1:05d}-of-{len(shards):05d}.safetensors"
            tensors = [planned for step in shard for planned in step.tensors]
            header, entries = encode_header({t.name: (t.tag, t.shape) for t in _aligned(tensors)}, align=PAGE)
            infos.update({t.name: _info(t, file, entries[t.name]) for t in tensors})
            with Shard(directory / file, header, buffers) as out:
                _write(out, entries, shard, done, writing)
            sums[file] = out.checksum()
    return infos, sums


def _write(
    out: Shard,
    entries: Mapping[str, Entry],
    steps: Sequence[Step],
    done: Callable[[int], None],
    writing: ThreadPoolExecutor,
) -> None:
    """Every piece, few of them at a time; an error only once no thread writes any more."""
    pending: deque[tuple[Future[None], int]] = deque()
    try:
        for part in _made_ahead(steps):
            made = part.made
            begin = entries[part.planned.name].offset + part.expert * made.nbytes
            for first, nbytes in _pieces(made, begin):
                while len(pending) > WRITERS:
                    _finish(pending, done)
                pending.append((writing.submit(out.put, begin + first, made, first, nbytes), nbytes))
        while pending:
            _finish(pending, done)
    finally:
        wait(future for future, _ in pending)


def _finish(pending: deque[tuple[Future[None], int]], done: Callable[[int], None]) -> None:
    future, nbytes = pending.popleft()
    future.result()
    done(nbytes)


def _pieces(made: Made, offset: int) -> Iterator[tuple[int, int]]:
    """Where in a tensor that lies at `offset` each piece begins, and its bytes. Where it may be cut anywhere,
    that is at a page of the file."""
    size = max(PIECE // made.unit, 1) * made.unit
    begin = 0
    while begin < made.nbytes:
        end = begin + size
        if made.unit == 1:
            end -= (offset + end) % PAGE
        yield begin, min(end, made.nbytes) - begin
        begin = end


def _made_ahead(steps: Sequence[Step]) -> Iterator[_Part]:
    """Each step's tensors, expert by expert; the next are being made while the last are used."""
    parts = [(step, expert) for step in steps for expert in range(max(step.experts, 1))]
    with ThreadPoolExecutor(MAKERS) as making:
        ahead: list[Future[list[_Part]]] = []
        for index in range(len(parts)):
            while len(ahead) <= MAKERS and index + len(ahead) < len(parts):
                ahead.append(making.submit(_make, *parts[index + len(ahead)]))
            yield from ahead.pop(0).result()


def _make(step: Step, expert: int) -> list[_Part]:
    parts = []
    for planned, made in zip(step.tensors, step.build(expert), strict=True):
        shape = planned.shape[1:] if step.experts else planned.shape
        if TAGS[made.dtype] != planned.tag or made.shape != shape:
            raise AssertionError(
                f"{planned.name}: built {made.dtype} {list(made.shape)}, planned {planned.tag} {list(shape)}"
            )
        parts.append(_Part(planned, expert, made))
    return parts


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
    """Whole pages first, then whole cache lines, so that those tensors start on one; then by element size."""
    return sorted(tensors, key=lambda t: (t.nbytes % PAGE != 0, t.nbytes % LINE != 0, -_odd(t.nbytes)))


def _odd(nbytes: int) -> int:
    """The power of two in a size that is not of whole cache lines."""
    return nbytes & -nbytes if nbytes % LINE else 0


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
