"""`turbomill eval compare` of runs of tasks: each model beside the first, paired document by document."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from turbomill.errors import UsageError
from turbomill.reports.bootstrap import Counted, paired
from turbomill.reports.compare import SIGNIFICANT, Compared, Verdict, compared_entry, holm
from turbomill.reports.runs import Run, TaskScore

Key = tuple[str, str, str]  # task, metric, filter


def _scores(run: Run) -> dict[Key, TaskScore]:
    rows = [row for row in run.tasks if row.items is not None and not row.group]
    return {(row.task, row.metric, row.filter): row for row in rows}


def _name(run: Run) -> str:
    return run.model.name if run.model else run.kind


def compare_tasks(paths: Sequence[Path], runs: Sequence[Run]) -> list[Compared]:
    """Every metric that is a mean over documents and that all runs have.

    Holm's correction counts all of them: of many tasks, one differs by chance. Raises UsageError for runs
    that cannot be compared.
    """
    if len(runs) < 2:
        raise UsageError(f"{paths[0]}: a single run of tasks, expected two or more: give another RUN")
    first, *others = [_scores(run) for run in runs]
    pairs: list[tuple[int, Key]] = []
    for number, scores in enumerate(others, 1):
        for key in [key for key in first if key in scores]:
            if scores[key].items_sha256 != first[key].items_sha256:
                raise UsageError(
                    f"{paths[number]}: {key[0]} was asked other documents or otherwise than in {paths[0]}; "
                    "make both runs with the same --tasks, --limit, --num-fewshot and --apply-chat-template"
                )
            if scores[key].documents > 1:
                pairs.append((number, key))
    if not pairs:
        raise UsageError(f"{paths[0]}: shares no task of two or more documents with the others")
    found = [paired(_counted(first[key]), _counted(others[number - 1][key])) for number, key in pairs]
    rows = []
    for (number, key), change, p in zip(pairs, found, holm([d.p_value for d in found]), strict=True):
        now, then = others[number - 1][key], first[key]
        verdict: Verdict = "no difference shown"
        if p < SIGNIFICANT:
            verdict = "better" if (change.mean > 0) == (now.higher_is_better is not False) else "worse"
        metric = f"{key[0]}, {key[1]}" + ("" if key[2] == "none" else f", {key[2]}")
        name, baseline = _name(runs[number]), _name(runs[0])
        rows.append(Compared(name, baseline, metric, now.value, then.value, change, p, verdict))
    return rows


def _counted(score: TaskScore) -> Counted:
    return Counted(np.array(score.items), np.ones(score.documents, np.int64))


def compared_tasks_json(
    paths: Sequence[Path], runs: Sequence[Run], rows: Sequence[Compared]
) -> dict[str, Any]:
    """What `--json` prints."""
    models = [{"name": _name(run), "run": str(path)} for path, run in zip(paths, runs, strict=True)]
    return {
        "baseline": models[0]["name"],
        "models": models,
        "comparisons": [compared_entry(row) for row in rows],
    }
