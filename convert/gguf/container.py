"""The GGUF container, versions 2 and 3 (github.com/ggml-org/ggml, docs/gguf.md): metadata and tensor infos.

Every length is compared with what is left of the file before anything is read or allocated for it.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from turbomill.convert.safetensors_io import map_file
from turbomill.errors import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMENSIONS = 4  # ggml's
SHORT_ARRAY = 4096  # longer arrays of numbers, and arrays of strings, are checked and left in the file
STRING, ARRAY = 8, 9
SMALLEST_INFO, SMALLEST_FIELD = 32, 13  # bytes
SCALARS = dict(enumerate("BbHhIif?", 0)) | {10: "Q", 11: "q", 12: "d"}  # value type -> struct's letter


@dataclass(frozen=True)
class GgufTensor:
    """One tensor of a file: its block type, row-major shape, and where its bytes are."""

    name: str
    kind: str  # ggml's name of the type: F16, Q4_0, ...
    shape: tuple[int, ...]
    file: GgufFile
    offset: int  # from the start of the file
    nbytes: int

    def rows(self) -> np.ndarray:
        """Its bytes, uint8 [..., bytes of a row], mapped."""
        raw = np.frombuffer(self.file.data, np.uint8, self.nbytes, self.offset)
        return raw.reshape(*self.shape[:-1], -1)


@dataclass(frozen=True)
class GgufFile:
    """A file's metadata (None for a long array) and tensors, by name; nothing of the tensors is read."""

    path: Path
    data: mmap.mmap
    fields: dict[str, Any]
    tensors: dict[str, GgufTensor]


def read_gguf(path: Path) -> GgufFile:
    """Read and check a file's header. Raises CheckpointError, naming the file and the field or tensor."""
    try:
        size = path.stat().st_size
        data = map_file(path) if size else None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    if data is None or data[:4] != MAGIC:
        found = bytes(data[:4]) if data else b""
        raise CheckpointError(f"{path}: not a GGUF file: its magic is {found!r}, expected {MAGIC!r}")
    cursor = _Cursor(path, data, 4)
    version = cursor.number("I", "version")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        what = "a big-endian file" if swapped in VERSIONS else f"GGUF version {version}"
        raise CheckpointError(f"{path}: {what} is not supported; supported: little-endian, versions 2 and 3")
    counts = cursor.number("Q", "number of tensors"), cursor.number("Q", "number of fields")
    if counts[0] * SMALLEST_INFO + counts[1] * SMALLEST_FIELD > size:
        raise CheckpointError(
            f"{path}: truncated or damaged: {counts[0]} tensors and {counts[1]} fields in {size} bytes; "
            "copy or download it again"
        )
    fields: dict[str, Any] = {}
    for _ in range(counts[1]):
        key = cursor.string("a metadata key")
        if key in fields:
            raise CheckpointError(f"{path}: metadata {key} is there twice")
        fields[key] = cursor.value(cursor.number("I", key), key)
    infos = [_info(cursor) for _ in range(counts[0])]
    file = GgufFile(path, data, fields, {})
    alignment = fields.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise CheckpointError(f"{path}: general.alignment is {alignment}, expected a power of two")
    start = -(-cursor.at // alignment) * alignment
    for name, dims, kind, offset in infos:
        if name in file.tensors:
            raise CheckpointError(f"{path}: tensor {name} is there twice")
        if offset % alignment:
            raise CheckpointError(f"{path}: tensor {name}: offset {offset} is no multiple of {alignment}")
        file.tensors[name] = _tensor(file, name, dims, kind, start + offset, size)
    _check_overlap(file)
    return file


class _Cursor:
    """Reads little-endian values one after the other, none beyond the end of the file."""

    def __init__(self, path: Path, data: mmap.mmap, at: int) -> None:
        self.path, self.data, self.at, self.size = path, data, at, len(data)

    def skip(self, count: int, what: str) -> int:
        """Step over `count` bytes; where they begin."""
        if count > self.size - self.at:
            raise CheckpointError(
                f"{self.path}: truncated or damaged: {what} needs {count} bytes at {self.at}, the file has "
                f"{self.size}; copy or download it again"
            )
        self.at += count
        return self.at - count

    def number(self, letter: str, what: str) -> Any:
        """One scalar, of struct's type `letter`."""
        return struct.unpack_from(f"<{letter}", self.data, self.skip(struct.calcsize(f"<{letter}"), what))[0]

    def string(self, what: str) -> str:
        """UTF-8, after its length."""
        length = self.number("Q", what)
        begin = self.skip(length, what)
        try:
            return self.data[begin : begin + length].decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path}: {what} is not UTF-8; the file is damaged") from error

    def value(self, kind: int, key: str) -> Any:
        """A field's value; None for an array that is long or of strings."""
        if kind in SCALARS:
            return self.number(SCALARS[kind], key)
        if kind == STRING:
            return self.string(key)
        if kind != ARRAY:
            raise CheckpointError(
                f"{self.path}: metadata {key}: type {kind} is not known; the file is damaged"
            )
        inner, count = self.number("I", key), self.number("Q", key)
        if inner in SCALARS:
            layout = struct.Struct(f"<{SCALARS[inner]}")
            begin = self.skip(count * layout.size, key)
            if count > SHORT_ARRAY:
                return None
            return [layout.unpack_from(self.data, begin + i * layout.size)[0] for i in range(count)]
        if inner != STRING:
            raise CheckpointError(f"{self.path}: metadata {key}: an array of type {inner} is not known")
        if count > (self.size - self.at) // 8:
            self.skip(8 * count, key)
        for _ in range(count):
            self.skip(self.number("Q", key), key)
        return None


def _info(cursor: _Cursor) -> tuple[str, list[int], int, int]:
    """A tensor's name, dimensions (the fastest first), type and offset from the start of the data."""
    name = cursor.string("a tensor's name")
    count = cursor.number("I", f"tensor {name}")
    if not 1 <= count <= MAX_DIMENSIONS:
        raise CheckpointError(f"{cursor.path}: tensor {name}: {count} dimensions; the file is damaged")
    dims = [cursor.number("Q", f"tensor {name}") for _ in range(count)]
    return name, dims, cursor.number("I", f"tensor {name}"), cursor.number("Q", f"tensor {name}")


def _tensor(file: GgufFile, name: str, dims: list[int], kind: int, offset: int, size: int) -> GgufTensor:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        known = GGMLQuantizationType(kind)
    except ValueError:
        raise CheckpointError(
            f"{file.path}: tensor {name}: type {kind} is not known to the gguf library"
        ) from None
    block, bytes_of_block = GGML_QUANT_SIZES[known]
    if dims[0] % block:
        raise CheckpointError(
            f"{file.path}: tensor {name}: rows of {dims[0]} are not whole blocks of {known.name} ({block})"
        )
    nbytes = prod(dims) // block * bytes_of_block
    if offset + nbytes > size:
        raise CheckpointError(
            f"{file.path}: tensor {name}: truncated file: it ends at {size}, the data at {offset + nbytes}; "
            "copy or download it again"
        )
    return GgufTensor(name, known.name, tuple(reversed(dims)), file, offset, nbytes)


def _check_overlap(file: GgufFile) -> None:
    filled = [tensor for tensor in file.tensors.values() if tensor.nbytes]
    for one, other in pairwise(sorted(filled, key=lambda tensor: tensor.offset)):
        if one.offset + one.nbytes > other.offset:
            raise CheckpointError(f"{file.path}: tensors {one.name} and {other.name} overlap")
