"""Steps of a long job, each redone only when what goes into it has changed."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turbomill import __version__
from turbomill.reports.runs import write_atomic

logger = logging.getLogger("turbomill.reports")


@dataclass(frozen=True)
class Step:
    """Makes the file or directory `output`, which appears whole; `inputs` are all that can change it."""

    title: str
    output: Path
    inputs: dict[str, Any]

    @property
    def fingerprint(self) -> str:
        """Of the inputs and the program's version."""
        content = json.dumps([__version__, self.inputs], sort_keys=True, default=str)
        return hashlib.sha256(content.encode()).hexdigest()

    @property
    def stamp(self) -> Path:
        """Lies beside the output and says what it was made from."""
        return self.output.with_name(f"{self.output.name}.step.json")

    @property
    def done(self) -> bool:
        """Whether the output is there and was made from these inputs."""
        if not self.output.exists():
            return False
        try:
            return json.loads(self.stamp.read_text(encoding="utf-8"))["fingerprint"] == self.fingerprint
        except (OSError, ValueError, LookupError, TypeError):
            return False

    def run(self, make: Callable[[Path], object]) -> bool:
        """Make the output unless it is done; returns whether it was made."""
        if self.done:
            logger.info("%s: unchanged, reused", self.title)
            return False
        logger.info("%s", self.title)
        self.stamp.unlink(missing_ok=True)  # an interrupted step is not done
        make(self.output)
        record = {"fingerprint": self.fingerprint, "turbomill": __version__, "inputs": self.inputs}
        write_atomic(self.stamp, json.dumps(record, indent=2, default=str) + "\n")
        return True


def text_version(dataset: str) -> list[int | None]:
    """Changes when a local text does; several are joined by commas."""
    paths = [Path(name) for name in dataset.split(",")]
    return [path.stat().st_mtime_ns if path.exists() else None for path in paths]
