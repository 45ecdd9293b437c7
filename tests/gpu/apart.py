"""Runs a script in a process of its own, whose CUDA context it may spoil."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
FOLDERS = [str(TESTS / name) for name in ("engine", "engine/native", "models", "kernels")]
DONE = "as it should be"  # what a script prints at its end


def run_apart(script: str, *arguments: str) -> None:
    """Fails with the script's errors; it may import the helpers of these tests."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {FOLDERS!r}\n{script}", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert DONE in done.stdout
