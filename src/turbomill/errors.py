"""The errors a user can cause or meet: each is one line that names the thing and says what to do."""

from __future__ import annotations


class TurbomillError(Exception):
    """Something failed for a reason the user can act on. Shown as one line, exit code 1."""

    exit_code = 1

    def __init__(self, message: object = "") -> None:
        super().__init__(" ".join(str(message).splitlines()))  # what a file says may have lines of its own


class UsageError(TurbomillError):
    """A wrong option or argument. Exit code 2."""

    exit_code = 2


class CheckpointError(TurbomillError):
    """A checkpoint or store cannot be read: missing, truncated, or not what it says it is."""


class UnsupportedModelError(TurbomillError):
    """The architecture or weight format is not supported here."""
