"""Finds the harness's tasks by name and loads their data; what is missing says how to get it."""

from __future__ import annotations

import difflib
import importlib.util
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from turbomill.errors import TurbomillError, UsageError

OWN = Path(__file__).parent / "tasks"
OFFLINE = "turbomill_offline"  # the group of all tasks that need no download


def require_harness() -> None:
    """Raise UsageError when lm-evaluation-harness is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise UsageError("eval tasks: lm-evaluation-harness is missing; run `pip install 'turbomill[eval]'`")


def task_manager(names: Sequence[str], include: Path | None = None) -> Any:
    """The harness's index, with our tasks. Its own take seconds to read, and only where one is asked for."""
    from lm_eval.tasks import TaskManager

    paths: list[str | Path] = [OWN, *([include] if include else [])]
    own = TaskManager(include_path=paths, include_defaults=False)
    if names and all(name in own.all_tasks for name in names):
        return own
    return TaskManager(include_path=paths)


def task_names(include: Path | None = None) -> list[str]:
    """Every task, group and tag."""
    return task_manager((), include).all_tasks


def load_tasks(names: Sequence[str], include: Path | None = None) -> dict[str, Any]:
    """The tasks and groups of these names, as `lm_eval.evaluate` takes them. Raises TurbomillError.

    Tasks that draw their data draw the same every time.
    """
    import numpy as np

    if include is not None and not include.is_dir():
        raise UsageError(f"--include-path {include}: no such directory; expected one with the harness's YAML")
    manager = task_manager(names, include)
    for name in names:
        if name not in manager.all_tasks:
            near = difflib.get_close_matches(name, manager.all_tasks, 3)
            hint = f"did you mean {' or '.join(near)}?" if near else "see `turbomill eval tasks --list`"
            raise UsageError(f"--tasks {name}: the harness has no such task; {hint}")
    loaded: dict[str, Any] = {"tasks": {}, "groups": {}, "group_map": {}}
    for name in dict.fromkeys(names):
        random.seed(0)
        np.random.seed(1234)
        try:
            found = manager.load([name])
        except (OSError, ImportError, ValueError, LookupError, RuntimeError) as error:
            raise TurbomillError(_missing(name, manager, error)) from error
        for part, entries in loaded.items():
            entries.update(found[part])
    return loaded


def _missing(name: str, manager: Any, error: Exception) -> str:
    """Why a task has no data, and how to get it."""
    if isinstance(error, ImportError):
        return f"--tasks {name}: needs a package that is missing ({error}); install it and start again"
    reason = f"{type(error).__name__}: {error}"
    # The library names the set that it looked for; of a group, the task's own config would not do.
    named = re.search(r"'([\w.-]+/[\w.-]+)'", str(error))
    entry = manager.task_index[name]
    path = named[1] if named else (entry.cfg or {}).get("dataset_path") or "PATH"
    set_name = (entry.cfg or {}).get("dataset_name")
    arguments = f"'{path}'" + (f", '{set_name}'" if set_name else "")
    return (
        f"--tasks {name}: its data could not be loaded ({reason}). Where there is a network, run "
        f'`python -c "import datasets; datasets.load_dataset({arguments})"`, copy ~/.cache/huggingface (or '
        f"$HF_HOME) to this machine and set HF_HUB_OFFLINE=1; {OFFLINE} needs no download"
    )
