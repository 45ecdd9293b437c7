"""Opens MODEL as a store; a checkpoint is converted once into the user's cache."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from turbomill import __version__

if TYPE_CHECKING:
    from turbomill.convert.store import Store

logger = logging.getLogger("turbomill.engine")


def cache_dir() -> Path:
    """`TURBOMILL_CACHE`, or `turbomill` in the user's cache folder."""
    if own := os.environ.get("TURBOMILL_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "turbomill"


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Let one process at a time convert into `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(path.name + ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _cache_key(path: Path) -> str:
    """Changes whenever the checkpoint's files or the converter change. Contents may be huge: not read."""
    from turbomill.convert.store.manifest import FORMAT_VERSION

    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    digest = hashlib.sha256(f"{__version__}\n{FORMAT_VERSION}\n".encode())
    for file in files:
        stat = file.stat()
        digest.update(f"{file}\t{stat.st_size}\t{stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:32]


def open_model(model: str | Path) -> Store:
    """Open MODEL (a store, a checkpoint, a GGUF file, a hub name, `demo`) as a store.

    Anything but a store is converted the first time, into `cache_dir()/stores/<fingerprint>`. Raises
    CheckpointError or UnsupportedModelError.
    """
    from turbomill.convert.source import kind_of, resolve_model

    path = resolve_model(model)
    kind = kind_of(path)
    # Imports torch: a wrong path is answered before.
    from turbomill.convert.store import convert_checkpoint, open_store

    if kind == "store":
        return open_store(path)
    cached = cache_dir() / "stores" / _cache_key(path)
    with _locked(cached):
        if cached.exists():
            logger.info("%s: using the store converted before, %s", model, cached)
            return open_store(cached)
        logger.info("%s: converting once into %s", model, cached)
        return convert_checkpoint(path, cached)
