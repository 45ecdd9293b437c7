"""What an interrupted evaluation has scored: the same one, started again, goes on from there."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from turbomill import __version__
from turbomill.reports.scores import WindowResult

logger = logging.getLogger("turbomill.reports")

ARRAYS = ("nll", "kl", "top1", "top5")


@dataclass(frozen=True)
class Journal:
    """One file for each scored window, in a directory named by all that can change the scores."""

    path: Path

    @classmethod
    def of(cls, cache: Path, **inputs: Any) -> Journal:
        """The journal of these inputs: fingerprints of models and windows, and the engine's options."""
        content = json.dumps([__version__, inputs], sort_keys=True, default=str)
        return cls(cache / f"unfinished-{hashlib.sha256(content.encode()).hexdigest()[:32]}")

    def _file(self, part: str, index: int) -> Path:
        return self.path / f"{part}-{index}.npz"

    def load(self, part: str, index: int) -> WindowResult | None:
        """Window `index` of `part` (a KV policy), if it was scored."""
        file = self._file(part, index)
        try:
            with np.load(file) as found:
                arrays = [found.get(name) for name in ARRAYS]
                return WindowResult(*arrays, first=int(found["first"]))  # type: ignore[arg-type]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, zipfile.BadZipFile):
            logger.warning("%s: damaged, the window is scored again", file)
            return None

    def save(self, part: str, index: int, result: WindowResult) -> None:
        """Keep a window's result; the file appears whole."""
        self.path.mkdir(parents=True, exist_ok=True)
        file = self._file(part, index)
        temp = file.with_suffix(f".{os.getpid()}.partial")
        arrays = {name: array for name in ARRAYS if (array := getattr(result, name)) is not None}
        with temp.open("wb") as out:
            np.savez(out, first=result.first, **arrays)
        temp.replace(file)

    def finish(self) -> None:
        """The evaluation is whole: the next one measures anew."""
        shutil.rmtree(self.path, ignore_errors=True)
