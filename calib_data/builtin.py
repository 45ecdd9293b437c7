"""The text that is always there: the language reference that ships inside Python itself."""

from __future__ import annotations

SPLITS = ("calibration", "evaluation")


def topics(split: str) -> list[str]:
    """Topics of `pydoc_data.topics` sorted by key: the even-numbered for calibration, the odd-numbered for
    evaluation.

    The text belongs to the running Python, so results compare only between equal minor versions of it.
    """
    from pydoc_data.topics import topics as table

    return [table[key] for key in sorted(table)[SPLITS.index(split) :: 2]]
