"""Terminal, logs, progress and provenance: what every command shares. Imports nothing heavy."""

from __future__ import annotations

import json
import logging
import os
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Any

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

# Logs, tables and progress go to stderr; stdout is for results (`--json`, generated text).
stderr = Console(stderr=True)
stdout = Console()

PACKAGES = ("torch", "transformers", "safetensors", "gguf", "datasets", "scipy-openblas64", "numpy")


def setup_logging(level: str = "INFO") -> None:
    """Send the `turbomill` loggers to stderr: rich on a terminal, plain lines elsewhere."""
    handler: logging.Handler
    if stderr.is_terminal:
        handler = RichHandler(console=stderr, show_path=False, log_time_format="%H:%M:%S")
        handler.setFormatter(logging.Formatter("%(message)s"))
    else:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
    logger = logging.getLogger("turbomill")
    logger.handlers[:] = [handler]
    logger.setLevel(level)
    logger.propagate = False


class Task:
    """One piece of long work: a progress bar on a terminal, a log line every ten seconds elsewhere."""

    def __init__(self, title: str, total: int, bar: Progress | None) -> None:
        self.title, self.total, self.done = title, total, 0
        self._bar = bar
        self._task = bar.add_task(title, total=total) if bar else None
        self._start = self._last = time.monotonic()

    def advance(self, steps: int = 1, note: str = "") -> None:
        """Count `steps` as done; `note` is shown beside the title."""
        self.done += steps
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, advance=steps, description=f"{self.title} {note}".rstrip())
            return
        now = time.monotonic()
        if now - self._last > 10 or self.done == self.total:
            self._last = now
            elapsed = now - self._start
            left = elapsed / self.done * (self.total - self.done) if self.done else 0.0
            logging.getLogger("turbomill").info(
                "%s %d/%d, %.0f s, %.0f s left %s", self.title, self.done, self.total, elapsed, left, note
            )


@contextmanager
def progress(title: str, total: int) -> Iterator[Task]:
    """Show `total` steps of work with an ETA. Use as `with progress("AWQ", 30) as task: task.advance()`."""
    if not stderr.is_terminal:
        yield Task(title, total, None)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=stderr) as bar:
        yield Task(title, total, bar)


def emit_json(value: Any) -> None:
    """Print machine output on stdout: one JSON document, nothing else."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def versions() -> dict[str, str]:
    """Versions of Python, Turbomill and the packages whose version can change a result."""
    found = {"python": platform.python_version()}
    for name in ("turbomill", *PACKAGES):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def cpu_name() -> str:
    """The processor's name, as the system reports it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:  # noqa: PTH123
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def provenance(**inputs: Any) -> dict[str, Any]:
    """What made a result: command line, time, versions, machine, `inputs` (seeds, fingerprints)."""
    return {
        "command": " ".join(["turbomill", *sys.argv[1:]]),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": versions(),
        "machine": {"cpu": cpu_name(), "cores": len(os.sched_getaffinity(0)), "system": platform.platform()},
        **inputs,
    }
