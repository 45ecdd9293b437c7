"""`turbomill runs`: what was measured, and where it lies."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from turbomill.errors import TurbomillError
from turbomill.reports.runs import RUN_FILE, Run, load_run
from turbomill.reports.summary import summarize_runs

DEPTH = 4  # folders below the one that is named


@dataclass(frozen=True)
class FoundRun:
    """One run.json."""

    path: str  # its directory
    kind: str
    status: str  # complete, failed or unreadable
    model: str
    time: str
    says: str  # in a sentence: its first result, or why it failed

    def to_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return asdict(self)


def find_runs(folders: Iterable[Path]) -> list[FoundRun]:
    """Every run in the folders and below, oldest first; what cannot be read is listed too, last."""
    files = {
        file.resolve(): file
        for folder in folders
        for depth in range(DEPTH + 1)
        for file in folder.glob("*/" * depth + RUN_FILE)
    }
    return sorted((_found(file) for file in files.values()), key=lambda row: (row.time or "~", row.path))


def _found(file: Path) -> FoundRun:
    try:
        run = load_run(file)
    except TurbomillError as error:
        return FoundRun(str(file.parent), "", "unreadable", "", "", str(error))
    model = run.model.name if run.model else ""
    time = str(run.provenance.get("time", ""))
    return FoundRun(str(file.parent), run.kind, run.status, model, time, _says(run))


def _says(run: Run) -> str:
    return (summarize_runs([run]) or ["nothing was measured"])[0]
