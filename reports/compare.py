"""`turbomill eval compare`: which of several scored models differ by more than chance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from turbomill.errors import UsageError
from turbomill.reports.bootstrap import Counted, Difference, paired
from turbomill.reports.runs import Run, WindowScores, load_run

SIGNIFICANT = 0.05  # of the p-values after Holm's correction
Verdict = Literal["better", "worse", "no difference shown"]


@dataclass(frozen=True)
class Scored:
    """One model, or one model under one KV cache, with its windows' scores."""

    name: str
    run: str  # its path, as the user gave it
    text: object  # which windows: equal for what can be compared
    reference: str | None  # the fingerprint of what KL is against
    ppl: float
    kl: float | None
    windows: WindowScores

    def counted(self, metric: str) -> Counted:
        """`nll` or `kl` by window."""
        tokens = np.array(self.windows.tokens)
        # KL also counts the first window's first position, which no weight needs to know.
        return Counted(np.array(getattr(self.windows, metric)), tokens)


@dataclass(frozen=True)
class Compared:
    """One model beside the first.

    Differences are of the mean NLL, or KL, in nats: below 0 is better; of tasks they are of the metric.
    """

    name: str
    baseline: str
    metric: str  # "nll", "kl", or a task and its metric
    value: float  # perplexity or KL, or the metric
    baseline_value: float
    difference: Difference
    p_value: float  # after Holm's correction for the number of comparisons of this metric
    verdict: Verdict


def scored_models(paths: Sequence[Path]) -> list[Scored]:
    """What the runs scored, in order. Raises TurbomillError for a run without scores by window."""
    found = [scored for path in paths for scored in _scored(load_run(path), path)]
    if len(found) < 2:
        raise UsageError(f"{paths[0]}: a single scored model, expected two or more: give another RUN")
    first = found[0]
    for other in found[1:]:
        if other.text != first.text:
            raise UsageError(
                f"{other.run}: was scored on other windows of text than {first.run}; make both runs "
                "with the same --dataset, --windows, --window-len and --stride"
            )
    if len(first.windows.nll) < 2:
        raise UsageError(f"{first.run}: one window of text shows no spread, expected at least two --windows")
    return found


def _scored(run: Run, path: Path) -> list[Scored]:
    name = run.model.name if run.model else str(path)
    cut = run.windows or {}
    text = (cut.get("sha256"), cut.get("stride"))
    reference = run.reference and run.reference.fingerprint
    rows: list[tuple[str, float, float | None, WindowScores | None]] = []
    if run.score is not None:
        rows.append((name, run.score.ppl, run.score.kl, run.score.per_window))
    rows += [(f"{name} KV {p.name}", p.ppl, p.kl, p.per_window) for p in run.policies]
    found = []
    for label, ppl, kl, windows in rows:
        if windows is None or windows.tokens is None or cut.get("sha256") is None:
            raise UsageError(f"{path}: has no scores by window, being of an older version: make it again")
        found.append(Scored(label, str(path), text, reference, ppl, kl, windows))
    if not found:
        raise UsageError(f"{path}: scored nothing ({run.kind}, {run.status}); give runs of `turbomill eval`")
    return found


def compare(models: Sequence[Scored]) -> list[Compared]:
    """Every model beside the first, by NLL and, where they share a reference, by KL."""
    first, *others = models
    rows: list[Compared] = []
    for metric in ("nll", "kl"):
        able = [m for m in others if metric == "nll" or _share_reference(first, m)]
        found = [paired(first.counted(metric), m.counted(metric)) for m in able]
        for model, difference, p in zip(able, found, holm([d.p_value for d in found]), strict=True):
            verdict: Verdict = "no difference shown"
            if p < SIGNIFICANT:
                verdict = "better" if difference.mean < 0 else "worse"
            values = (model.ppl, first.ppl) if metric == "nll" else (model.kl or 0.0, first.kl or 0.0)
            rows.append(Compared(model.name, first.name, metric, *values, difference, p, verdict))
    return rows


def _share_reference(a: Scored, b: Scored) -> bool:
    return a.windows.kl is not None and b.windows.kl is not None and a.reference == b.reference


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's correction (1979): what each p-value is worth when so many were looked at."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted, worst = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        worst = max(worst, min(1.0, p_values[i] * (len(p_values) - rank)))
        adjusted[i] = worst
    return adjusted


def compared_json(models: Sequence[Scored], rows: Sequence[Compared]) -> dict[str, Any]:
    """What `--json` prints: the models, and each beside the first. Ratios are of perplexities."""
    return {
        "baseline": models[0].name,
        "windows": len(models[0].windows.nll),
        "models": [{"name": m.name, "run": m.run, "ppl": m.ppl, "kl": m.kl} for m in models],
        "comparisons": [compared_entry(row) for row in rows],
    }


def compared_entry(row: Compared) -> dict[str, Any]:
    """One comparison for JSON."""
    entry = {**asdict(row), **asdict(row.difference), "p_value": row.p_value}
    del entry["mean"]
    entry["difference"] = row.difference.mean
    if row.metric == "nll":
        entry["ppl_ratio"] = math.exp(row.difference.mean)
    return entry
