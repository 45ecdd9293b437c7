"""What calibration carries from layer to layer: a list of fp32 tensors, in memory or in a file."""

from __future__ import annotations

import logging
import os
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator
from math import prod
from pathlib import Path

import torch
from torch import Tensor

logger = logging.getLogger("turbomill.quant")

SHARE = 0.3  # of the memory that is free: activations that need more go to disk by themselves


class Activations:
    """A list of tensors: append them once, replace them by others of the same shape."""

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        self._tensors = list(tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __getitem__(self, index: int) -> Tensor:
        return self._tensors[index]

    def __setitem__(self, index: int, tensor: Tensor) -> None:
        self._tensors[index] = tensor

    def __iter__(self) -> Iterator[Tensor]:
        return (self[index] for index in range(len(self)))

    def append(self, tensor: Tensor) -> None:
        """One more."""
        self._tensors.append(tensor)

    def clear(self) -> None:
        """None."""
        self._tensors.clear()


class SpooledActivations(Activations):
    """The same in a file without a name below `directory`, which disappears with the process.

    Tensors come back on the device they were on.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._file, name = tempfile.mkstemp(dir=directory)
        Path(name).unlink()
        weakref.finalize(self, os.close, self._file)
        self._places: list[tuple[int, torch.Size, torch.dtype, torch.device]] = []
        self._end = 0

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> Tensor:
        offset, shape, dtype, device = self._places[index]
        data = bytearray(prod(shape) * dtype.itemsize)
        view, done = memoryview(data), 0
        while done < len(data):
            read = os.preadv(self._file, [view[done:]], offset + done)
            if read == 0:
                raise OSError(f"spooled activations end at {offset + done} bytes")
            done += read
        return torch.frombuffer(data, dtype=dtype).reshape(shape).to(device)

    def __setitem__(self, index: int, tensor: Tensor) -> None:
        offset, shape, dtype, _ = self._places[index]
        if tensor.shape != shape or tensor.dtype != dtype:
            raise ValueError(
                f"spooled as {dtype} {list(shape)}, replaced by {tensor.dtype} {list(tensor.shape)}"
            )
        self._write(tensor, offset)

    def append(self, tensor: Tensor) -> None:
        """Written to the end of the file."""
        self._places.append((self._end, tensor.shape, tensor.dtype, tensor.device))
        self._end += self._write(tensor, self._end)

    def clear(self) -> None:
        """The file becomes empty."""
        self._places.clear()
        self._end = 0
        os.truncate(self._file, 0)

    def _write(self, tensor: Tensor, offset: int) -> int:
        data = memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        done = 0
        while done < len(data):
            done += os.pwrite(self._file, data[done:], offset + done)
        return len(data)


def choose(nbytes: int, asked: bool | None, directory: Path) -> Callable[[], Activations]:
    """Makes the activations of a run that needs `nbytes` for all: in memory or, when `asked` or too large, in
    files below `directory`."""
    free = available_memory()
    if asked or (asked is None and nbytes > SHARE * free):
        logger.info(
            "%.1f GB of calibration activations are kept on disk (%.1f GB of memory are free)",
            *(nbytes / 1e9, free / 1e9),
        )
        return lambda: SpooledActivations(directory)
    return Activations


def available_memory() -> int:
    """Bytes that programs can still take without swapping, as the system says; physical memory elsewhere."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found = next(line for line in lines if line.startswith("MemAvailable:"))
        return int(found.split()[1]) * 1024
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
