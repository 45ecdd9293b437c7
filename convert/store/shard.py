"""A shard's file: pieces written in any order by several threads, past the system's cache where that can be.

What is written has to be on the disk before the store appears. By way of the page cache, each byte would
cost the processor more than making it does, and push out what others have cached.
"""

from __future__ import annotations

import errno
import mmap
import os
import queue
import threading
from pathlib import Path

from isal.isal_zlib import crc32, crc32_combine

from turbomill.convert.store.made import Made

PAGE = 4096  # what direct writes are aligned to: no disk has larger blocks
FLUSH_BYTES = 1 << 27  # so many bytes after another go to the disk, where they are cached first
PIECE = 1 << 22  # bytes made and written together, unless a unit is larger


class Buffers:
    """Memory that pieces are made in, again and again: one for each of `count` threads that write."""

    def __init__(self, count: int) -> None:
        self._free: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        for _ in range(count):
            self._free.put(_pages(PIECE))

    def take(self, nbytes: int) -> memoryview:
        """Bytes, at least so many and a page, that start at a page; waits until there are some."""
        buffer = self._free.get()
        return buffer if len(buffer) >= nbytes + PAGE else _pages(nbytes)

    def give(self, buffer: memoryview) -> None:
        """Back."""
        self._free.put(buffer)


def _pages(nbytes: int) -> memoryview:
    return memoryview(mmap.mmap(-1, nbytes + PAGE))


class Shard:
    """The file `path`. It is on the disk when the context is left without an error."""

    def __init__(self, path: Path, header: bytes, buffers: Buffers) -> None:
        self._path, self._buffers = path, buffers
        self._cached = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        self._direct = _open_direct(path)
        self._lock = threading.Lock()
        self._unflushed = 0
        self._sums: dict[int, tuple[int, int]] = {}  # offset -> checksum and length
        self._note(0, memoryview(header))
        _write(self._cached, 0, memoryview(header))

    def put(self, offset: int, made: Made, begin: int, nbytes: int) -> None:
        """Make a piece and write it at `offset`."""
        buffer = self._buffers.take(nbytes)
        try:
            lead = offset % PAGE  # so that pages of the file are pages of memory
            piece = buffer[lead : lead + nbytes]
            made.fill(begin, piece)
            self._note(offset, piece)
            self._write(offset, piece)
        finally:
            self._buffers.give(buffer)

    def _note(self, offset: int, piece: memoryview) -> None:
        self._sums[offset] = crc32(piece), len(piece)

    def _write(self, offset: int, piece: memoryview) -> None:
        """Whole pages directly, what is left before and after them through the cache."""
        first = -offset % PAGE
        last = first + max(len(piece) - first, 0) // PAGE * PAGE
        if self._direct is None or last == first:
            first = last = 0
        else:
            try:
                _write(self._direct, offset + first, piece[first:last])
            except OSError as error:
                if error.errno != errno.EINVAL:  # opened, but not for pages of this size
                    raise
                first = last = 0
        if first:
            _write(self._cached, offset, piece[:first])
        if last < len(piece):
            _write(self._cached, offset + last, piece[last:])
        self._flush_some(len(piece) - (last - first))

    def _flush_some(self, written: int) -> None:
        """One of the threads that write waits for the disk when much is cached; the others go on."""
        with self._lock:
            self._unflushed += written
            if self._unflushed < FLUSH_BYTES:
                return
            self._unflushed = 0
        os.fdatasync(self._cached)

    def checksum(self) -> str:
        """Of the file, from its pieces'."""
        value = end = 0
        for offset, (part, length) in sorted(self._sums.items()):
            if offset != end and length:
                raise AssertionError(f"{self._path}: nothing was written from {end} to {offset}")
            value, end = crc32_combine(value, part, length), end + length
        return f"{value:08x}"

    def __enter__(self) -> Shard:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if kind is None:
                os.fdatasync(self._cached)
        finally:
            os.close(self._cached)
            if self._direct is not None:
                os.close(self._direct)


def _open_direct(path: Path) -> int | None:
    """None where the system, or the file's disk, knows no direct writes."""
    flag = getattr(os, "O_DIRECT", 0)
    try:
        return os.open(path, os.O_WRONLY | flag) if flag else None
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return None


def _write(handle: int, offset: int, data: memoryview) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(handle, data[done:], offset + done)
