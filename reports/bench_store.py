"""`turbomill bench store`: conversion beside a plain copy, loading beside a plain read, of the same bytes."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from turbomill.convert.checkpoint import open_checkpoint
from turbomill.convert.store import convert_checkpoint
from turbomill.engine.config import EngineConfig, GenerationConfig
from turbomill.engine.pipeline import Pipeline
from turbomill.engine.turbomind import TurbomindEngine
from turbomill.errors import UsageError
from turbomill.reports.random_checkpoint import shape_config, write_random_checkpoint

PIECE = 1 << 24


@dataclass(frozen=True)
class StoreSpeed:
    """Seconds, each from files that are not in the page cache, and bytes."""

    source_bytes: int  # of the checkpoint's weight files
    store_bytes: int  # of the store's
    read_source_s: float  # reading the checkpoint
    copy_s: float  # `cp -r` of it, to the disk
    convert_s: float  # to a store, to the disk
    read_store_s: float  # reading the store
    load_s: float  # the engine, from nothing to its first token

    @property
    def convert_to_copy(self) -> float:
        """Conversion's speed in source bytes, as a share of the copy's."""
        return self.copy_s / self.convert_s

    @property
    def load_to_read(self) -> float:
        """How many times a plain read a load takes."""
        return self.load_s / self.read_store_s

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "convert_to_copy": self.convert_to_copy, "load_to_read": self.load_to_read}


def bench_random(shape: str, bits: int, work_dir: Path | None = None, device: str = "auto") -> StoreSpeed:
    """The same of a checkpoint of random weights in one of SHAPES, with 4-bit linears or 16-bit ones."""
    config = shape_config(shape)
    with tempfile.TemporaryDirectory(prefix="bench-store-", dir=work_dir) as temp:
        checkpoint = write_random_checkpoint(Path(temp) / "checkpoint", config, bits)
        return bench_store(checkpoint, work_dir, device)


def bench_store(model: str | Path, work_dir: Path | None = None, device: str = "auto") -> StoreSpeed:
    """Measure MODEL, a checkpoint, once each; what is written goes to `work_dir` and away again.

    Raises UsageError for a store, and where the system cannot forget cached files.
    """
    if not hasattr(os, "posix_fadvise"):
        raise UsageError(
            "bench store: this system has no posix_fadvise, so every file would come from memory"
        )
    checkpoint = open_checkpoint(model)
    source = checkpoint.weight_files()
    with tempfile.TemporaryDirectory(prefix="bench-store-", dir=work_dir) as temp:
        folder = Path(temp)
        forget(source)
        read_source = seconds(lambda: read(source))
        forget(source)
        copy = seconds(lambda: _copy(checkpoint.path, folder / "copy"))
        shutil.rmtree(folder / "copy")
        forget(source)
        convert = seconds(lambda: _convert(model, folder / "store"))
        store = sorted((folder / "store").glob("*.safetensors"))
        forget(store)
        read(store)  # a virtual machine's host may cache what is read: then both that follow come from there
        forget(store)
        read_store = seconds(lambda: read(store))
        forget(store)
        load = seconds(lambda: _first_token(folder / "store", device))
        return StoreSpeed(
            source_bytes=sum(file.stat().st_size for file in source),
            store_bytes=sum(file.stat().st_size for file in store),
            read_source_s=read_source,
            copy_s=copy,
            convert_s=convert,
            read_store_s=read_store,
            load_s=load,
        )


def seconds(work: Callable[[], object]) -> float:
    """Wall-clock seconds that `work` takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def forget(files: Iterable[Path]) -> None:
    """Have the system drop the files' pages, so that they are read from the disk again."""
    for file in files:
        handle = os.open(file, os.O_RDONLY)
        try:
            os.fsync(handle)  # only clean pages can go
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def read(files: Iterable[Path]) -> int:
    """Read every byte, a piece at a time into one buffer; how many there were."""
    buffer, total = memoryview(bytearray(PIECE)), 0
    for file in files:
        with file.open("rb", buffering=0) as handle:
            while count := handle.readinto(buffer):
                total += count
    return total


def _copy(path: Path, dst: Path) -> None:
    subprocess.run(["cp", "-r", "-L", "--reflink=never", str(path), str(dst)], check=True)
    _to_disk(dst)


def _convert(model: str | Path, dst: Path) -> None:
    convert_checkpoint(model, dst)
    _to_disk(dst)


def _to_disk(path: Path) -> None:
    for file in [path] if path.is_file() else path.rglob("*"):
        if file.is_file():
            handle = os.open(file, os.O_RDONLY)
            os.fsync(handle)
            os.close(handle)


def _first_token(store: Path, device: str) -> None:
    config = EngineConfig(session_len=64, max_batch_size=1, device=device)
    with Pipeline(TurbomindEngine(store, config, reason="its loading is measured")) as pipe:
        pipe([[1]], GenerationConfig(max_new_tokens=1, ignore_eos=True))
