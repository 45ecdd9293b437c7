"""The reference's logits, computed once by our engine and kept on disk for every candidate."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from turbomill.convert.staged import StagedDirectory
from turbomill.errors import TurbomillError
from turbomill.reports.scores import Reference

logger = logging.getLogger("turbomill.reports")

LAYOUT = 1  # of the files; a change makes old caches unknown


def reference_key(store: str, windows: str, engine: dict[str, object], version: str) -> str:
    """Names a cache by all that can change it; `store` and `windows` are fingerprints."""
    content = json.dumps([LAYOUT, store, windows, engine, version], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:32]


@dataclass(frozen=True)
class ReferenceCache:
    """One directory per window, each of which appears whole: an interrupted pass goes on where it stopped."""

    path: Path

    def has(self, index: int) -> bool:
        """Whether window `index` is there."""
        return (self.path / str(index)).is_dir()

    def save(self, index: int, reference: Reference) -> None:
        """Keep one window."""
        with StagedDirectory(self.path / str(index)) as directory:
            for name, array in vars(reference).items():
                np.save(directory / f"{name}.npy", array)

    def load(self, index: int) -> Reference:
        """One window, mapped from disk."""
        directory = self.path / str(index)
        arrays = {
            name: np.load(directory / f"{name}.npy", mmap_mode="r" if name == "log_probs" else None)
            for name in Reference.__dataclass_fields__
        }
        return Reference(**arrays)

    def require_space(self, windows: int, length: int, vocab: int) -> None:
        """Raise TurbomillError when the disk will not hold the cache."""
        nearest = next(p for p in (self.path, *self.path.absolute().parents) if p.exists())
        free, needed = shutil.disk_usage(nearest).free, 2 * windows * length * vocab
        if needed > free:
            raise TurbomillError(
                f"{self.path}: the reference's logits need {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are "
                "free; use fewer --windows, or set TURBOMILL_CACHE to a larger disk"
            )
        logger.info("reference logits: %.0f MB in %s", needed / 1e6, self.path)
