"""Directories that appear under their name only when complete; some can be gone on with after a kill."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from turbomill.errors import UsageError


class StagedDirectory:
    """A directory that appears under its name only when complete. Use as a context manager.

    Work happens in a sibling named `.NAME.partial`; one left by a killed run is removed first.
    """

    def __init__(self, dst: Path) -> None:
        self.dst = Path(dst).absolute()
        self.temp = self.dst.parent / f".{self.dst.name}.partial"

    def __enter__(self) -> Path:
        try:
            self.dst.parent.mkdir(parents=True, exist_ok=True)
            self._prepare()
        except OSError as error:
            raise UsageError(f"{self.dst}: cannot be written: {error.strerror or error}") from error
        return self.temp

    def _prepare(self) -> None:
        shutil.rmtree(self.temp, ignore_errors=True)
        self.temp.mkdir()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            shutil.rmtree(self.temp, ignore_errors=True)
        else:
            self._appear()

    def _appear(self) -> None:
        # An old directory steps aside first, so that what stands under the name is always whole.
        old = self.dst.parent / f".{self.dst.name}.old"
        shutil.rmtree(old, ignore_errors=True)
        if self.dst.exists():
            self.dst.replace(old)
        self.temp.replace(self.dst)
        shutil.rmtree(old, ignore_errors=True)


def require_space(dst: Path, nbytes: int) -> None:
    """Raise UsageError unless the disk that `dst` will be on has room for `nbytes`."""
    folder = Path(dst).absolute().parent
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        raise UsageError(
            f"{dst}: needs {nbytes:,} bytes, the disk has {free:,} free: make room, or write elsewhere"
        )


class ResumableDirectory(StagedDirectory):
    """A staged directory whose unfinished work the same run goes on with, after a kill or an interruption.

    `identity` names everything that decides the result, flat: another run's directory is refused, by name,
    or discarded when `replace_other`. `append` records a part of the work as done, once its bytes are on
    disk; `entries` are the parts recorded so far.
    """

    IDENTITY, JOURNAL, LOCK = ".run.json", ".journal.jsonl", ".lock"
    # A failure of the machine or of its user, not of the work: what is done is worth keeping.
    KEPT = (KeyboardInterrupt, SystemExit, OSError, MemoryError)

    def __init__(self, dst: Path, identity: Mapping[str, Any], replace_other: bool = False) -> None:
        super().__init__(dst)
        self.identity = json.loads(json.dumps(identity))  # as it reads back
        self.replace_other = replace_other
        self.entries: list[dict[str, Any]] = []
        self._journal: IO[bytes] | None = None
        self._lock: IO[bytes] | None = None

    @classmethod
    def check(cls, dst: Path, identity: Mapping[str, Any]) -> bool:
        """Whether there is unfinished work of this run. Raises UsageError when it is another run's; of
        `identity`, only the names that both know are compared."""
        temp = StagedDirectory(dst).temp
        try:
            found = json.loads((temp / cls.IDENTITY).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        _compare(temp, found, json.loads(json.dumps(identity)))
        return (temp / cls.JOURNAL).is_file()

    def _prepare(self) -> None:
        try:
            unfinished = self.check(self.dst, self.identity)
        except UsageError:
            if not self.replace_other:
                raise
            unfinished = False
        self.temp.mkdir(exist_ok=True)
        self._lock = (self.temp / self.LOCK).open("wb")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise UsageError(f"{self.temp}: another run is writing here; wait for it, or stop it") from None
        for child in [] if unfinished else self.temp.iterdir():
            if child.is_dir():
                shutil.rmtree(child)
            elif child.name != self.LOCK:
                child.unlink()
        journal = self.temp / self.JOURNAL
        if unfinished:
            whole = _whole_lines(journal)
            self.entries = [json.loads(line) for line in whole]
            os.truncate(journal, sum(map(len, whole)))
        else:
            _write_durably(self.temp / self.IDENTITY, json.dumps(self.identity).encode())
        self._journal = journal.open("ab")

    def append(self, entry: Mapping[str, Any]) -> None:
        """Record a part as done. What it wrote must have been synced to disk."""
        assert self._journal is not None
        self._journal.write(json.dumps(entry).encode() + b"\n")
        self._journal.flush()
        os.fsync(self._journal.fileno())
        self.entries.append(dict(entry))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in (self._journal, self._lock):
            if file is not None:
                file.close()
        if kind is None:
            self._appear()
            for name in (self.IDENTITY, self.JOURNAL, self.LOCK):
                (self.dst / name).unlink(missing_ok=True)
        elif not (issubclass(kind, self.KEPT) and self.entries):
            shutil.rmtree(self.temp, ignore_errors=True)


def _compare(where: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    differing = [key for key in wanted if key in found and found[key] != wanted[key]]
    if not differing:
        return
    shown = ", ".join(
        f"{key} ({_short(found[key])} there, {_short(wanted[key])} here)" for key in differing[:5]
    )
    raise UsageError(
        f"{where}: holds an unfinished run with another {shown}; give that run's command again to finish it, "
        "or --overwrite to start anew"
    )


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:12]}..."


def _whole_lines(path: Path) -> list[bytes]:
    """The journal's lines, without one that a kill cut off."""
    lines = path.read_bytes().splitlines(keepends=True)
    return lines[:-1] if lines and not lines[-1].endswith(b"\n") else lines


def _write_durably(path: Path, data: bytes) -> None:
    """Whole or not at all, also if the machine stops."""
    temp = path.with_name(path.name + ".tmp")
    with temp.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temp.replace(path)
