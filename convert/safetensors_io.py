"""The safetensors container: headers checked before anything is trusted, tensors mapped, files streamed.

Format: 8 bytes little-endian header length, a JSON header (padded with spaces), then the tensors' bytes.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from turbomill.errors import CheckpointError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
TAGS = {dtype: tag for tag, dtype in DTYPES.items()}
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: its dtype tag, shape, and byte range from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of `path`, by name. Raises CheckpointError, naming file and tensor, if it is unsound."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise CheckpointError(
                    f"{path}: truncated or not safetensors (header of {length} bytes, file of {size}); "
                    "copy or download it again"
                )
            header = json.loads(file.read(length), object_pairs_hook=_once)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    except _TwiceError as error:
        raise CheckpointError(f"{path}: tensor {error} is there twice") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: the safetensors header is not JSON; copy or download the file again"
        ) from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the safetensors header is not a JSON object")
    header.pop("__metadata__", None)
    entries = {name: _entry(path, name, value, 8 + length, size) for name, value in header.items()}
    _check_overlap(path, entries)
    return entries


class _TwiceError(ValueError):
    """A key that a JSON object has twice: readers would differ in which one they take."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _TwiceError(key)
        found[key] = value
    return found


def _entry(path: Path, name: str, value: Any, data_start: int, size: int) -> Entry:
    try:
        tag, shape = value["dtype"], tuple(value["shape"])
        begin, end = value["data_offsets"]
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(f"{path}: tensor {name}: malformed header entry") from error
    if not all(type(number) is int for number in (*shape, begin, end)):
        raise CheckpointError(f"{path}: tensor {name}: malformed header entry: sizes are whole numbers")
    if not isinstance(tag, str) or tag not in DTYPES:
        raise CheckpointError(f"{path}: tensor {name}: dtype {tag} is not supported ({', '.join(DTYPES)})")
    expected = prod(shape) * DTYPES[tag].itemsize
    if min(shape, default=0) < 0 or begin < 0 or end - begin != expected:
        raise CheckpointError(
            f"{path}: tensor {name}: offsets {begin}..{end} do not hold {tag} {list(shape)}, {expected} bytes"
        )
    if data_start + end > size:
        raise CheckpointError(
            f"{path}: tensor {name}: truncated file: it ends at {size}, the data at {data_start + end}; "
            "copy or download it again"
        )
    return Entry(tag, shape, data_start + begin, expected)


def _check_overlap(path: Path, entries: Mapping[str, Entry]) -> None:
    last, last_end = "", 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if entry.nbytes and entry.offset < last_end:
            raise CheckpointError(f"{path}: tensors {last} and {name} overlap")
        if entry.nbytes:
            last, last_end = name, entry.offset + entry.nbytes


def map_file(path: Path) -> mmap.mmap:
    """A private copy-on-write map of the whole file: pages load when touched, writes never reach the disk."""
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def view(buffer: mmap.mmap, dtype: torch.dtype, shape: Sequence[int], offset: int) -> Tensor:
    """A tensor over `buffer`'s bytes at `offset`; copied only where the offset is not aligned."""
    count = prod(shape)
    if count == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    if offset % dtype.itemsize:
        raw = bytearray(buffer[offset : offset + count * dtype.itemsize])
        return torch.frombuffer(raw, dtype=dtype, count=count).reshape(tuple(shape))
    return torch.frombuffer(buffer, dtype=dtype, count=count, offset=offset).reshape(tuple(shape))


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The tensor's elements in row-major order, as bytes (no copy when it is contiguous)."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    array: Any = flat.view(torch.uint8).numpy()
    return memoryview(array)


def encode_header(
    tensors: Mapping[str, tuple[str, Sequence[int]]],
    align: int = 8,
    metadata: Mapping[str, str] | None = None,
) -> tuple[bytes, dict[str, Entry]]:
    """The header for `tensors` (name -> dtype tag, shape) laid end to end, and where each will lie.

    Padded so that the data starts at a multiple of `align` bytes of the file.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for name, (tag, shape) in tensors.items():
        nbytes = prod(shape) * DTYPES[tag].itemsize
        header[name] = {"dtype": tag, "shape": list(shape), "data_offsets": [position, position + nbytes]}
        position += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % align)
    start = 8 + len(text)
    entries = {
        name: Entry(
            tag,
            tuple(shape),
            start + header[name]["data_offsets"][0],
            header[name]["data_offsets"][1] - header[name]["data_offsets"][0],
        )
        for name, (tag, shape) in tensors.items()
    }
    return len(text).to_bytes(8, "little") + text, entries
