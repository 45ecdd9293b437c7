"""Runs beside those of another day: what became worse, by more than chance and tolerance."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from turbomill.errors import UsageError
from turbomill.reports.bootstrap import Counted, paired
from turbomill.reports.compare import SIGNIFICANT
from turbomill.reports.runs import Run, TaskScore, WindowScores

Change = Literal["better", "worse", "same"]
SERVE = (
    ("request_throughput", "requests/s", False),
    ("output_throughput", "output tokens/s", False),
    ("median_ttft_ms", "median TTFT, ms", True),
    ("p99_ttft_ms", "p99 TTFT, ms", True),
    ("median_tpot_ms", "median TPOT, ms", True),
    ("p99_tpot_ms", "p99 TPOT, ms", True),
)


@dataclass(frozen=True)
class Tolerance:
    """How much worse still counts as the same: a share of the baseline's value, of KL at least of 0.1."""

    quality: float = 0.01
    speed: float = 0.05

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 <= value < 1:
                raise UsageError(f"--{name}-tolerance {value}: expected a share from 0 to below 1")


@dataclass(frozen=True)
class Figure:
    """One measured number."""

    value: float
    low_is_good: bool
    kind: Literal["quality", "speed", "size"]
    floor: float = 0.0  # the tolerance is of at least this much
    windows: tuple[object, Counted] | None = None  # which text or documents, and the values by each


@dataclass(frozen=True)
class Changed:
    """One number, then and now."""

    name: str  # of the model or variant
    metric: str
    then: float
    now: float
    change: Change


def figures(runs: Sequence[Run]) -> dict[tuple[str, str], Figure]:
    """Every number that can be better or worse, by (name, metric)."""
    return {key: figure for run in runs for key, figure in _figures(run)}


def _figures(run: Run) -> Iterator[tuple[tuple[str, str], Figure]]:
    name = run.model.name if run.model else run.kind
    text = (run.windows or {}).get("sha256"), (run.windows or {}).get("stride")
    if run.score is not None:
        yield from _quality(name, run.score.ppl, run.score.kl, run.score.per_window, text)
    if run.model is not None and run.score is not None:
        yield (name, "size on disk, MB"), Figure(run.model.disk_bytes / 1e6, True, "size")
    for policy in run.policies:
        label = f"{name} KV {policy.name}"
        yield from _quality(label, policy.ppl, policy.kl, policy.per_window, text)
        for metric, value in (("passkey", policy.passkey), ("copy", policy.copied)):
            if value is not None:
                yield (label, metric), Figure(value, False, "quality")
        if policy.decode_tok_s is not None:
            yield (label, "decode tokens/s"), Figure(policy.decode_tok_s, False, "speed")
    for variant in run.variants:
        yield from _quality(variant.name, variant.ppl, variant.kl, None, text)
        yield (variant.name, "size on disk, MB"), Figure(variant.disk_bytes / 1e6, True, "size")
        if variant.decode_tok_s is not None:
            yield (variant.name, "decode tokens/s"), Figure(variant.decode_tok_s, False, "speed")
    for score in run.tasks:
        if score.higher_is_better is not None:
            yield _task(name, score)
    for speed in run.engine:
        label = f"{name} batch {speed.batch}, {speed.prompt_tokens} + {speed.completion_tokens}"
        yield (label, "prefill tokens/s"), Figure(speed.prefill_tok_s, False, "speed")
        yield (label, "decode tokens/s"), Figure(speed.decode_tok_s, False, "speed")
        for metric, value in (("prefill", speed.mixed_prefill_tok_s), ("decode", speed.mixed_decode_tok_s)):
            if value is not None:
                yield (label, f"mixed {metric} tokens/s"), Figure(value, False, "speed")
    for load in run.serve:
        label = f"server {load['model_id']} at {load['request_rate']} requests/s"
        for field, metric, low in SERVE:
            if load.get(field) is not None:
                yield (label, metric), Figure(float(load[field]), low, "speed")


def _task(name: str, score: TaskScore) -> tuple[tuple[str, str], Figure]:
    """Paired document by document where both runs asked the same ones; else by the tolerance alone."""
    items = None
    if score.items is not None and score.documents > 1:
        counts = np.ones(score.documents, np.int64)
        items = (score.items_sha256, Counted(np.array(score.items), counts))
    metric = score.metric if score.filter == "none" else f"{score.metric}, {score.filter}"
    figure = Figure(score.value, not score.higher_is_better, "quality", windows=items)
    return (name, f"{score.task}, {metric}"), figure


def _quality(
    name: str, ppl: float, kl: float | None, windows: WindowScores | None, text: object
) -> Iterator[tuple[tuple[str, str], Figure]]:
    def counted(values: list[float] | None) -> tuple[object, Counted] | None:
        if windows is None or windows.tokens is None or values is None or len(values) < 2:
            return None
        return text, Counted(np.array(values), np.array(windows.tokens))

    yield (name, "perplexity"), Figure(ppl, True, "quality", windows=counted(windows and windows.nll))
    if kl is not None:
        figure = Figure(max(kl, 0.0), True, "quality", 0.1, counted(windows and windows.kl))
        yield (name, "KL"), figure


def against(
    runs: Sequence[Run], baseline: Sequence[Run], tolerance: Tolerance | None = None
) -> list[Changed]:
    """Every number that both have, in the order of `runs`. Raises UsageError when they share none."""
    tolerance = tolerance or Tolerance()
    now, then = figures(runs), figures(baseline)
    shared = [key for key in now if key in then]
    if not shared:
        raise UsageError(
            f"--baseline: has no figure in common with the runs (it has {_names(then)}, they {_names(now)}); "
            "give runs of the same models under the same names"
        )
    pairs = [(key, then[key], now[key]) for key in shared]
    return [Changed(*key, a.value, b.value, _judge(b, a, tolerance)) for key, a, b in pairs]


def _names(found: Mapping[tuple[str, str], Figure]) -> str:
    return ", ".join(dict.fromkeys(name for name, _ in found)) or "nothing"


def _judge(now: Figure, then: Figure, tolerance: Tolerance) -> Change:
    change = (now.value - then.value) * (1 if now.low_is_good else -1)  # above 0: worse
    share = tolerance.speed if now.kind == "speed" else tolerance.quality
    if abs(change) <= share * max(abs(then.value), then.floor):
        return "same"
    if now.windows is not None and then.windows is not None and now.windows[0] == then.windows[0]:
        ours, theirs = now.windows[1], then.windows[1]
        if len(ours.means) == len(theirs.means) and paired(theirs, ours).p_value >= SIGNIFICANT:
            return "same"  # the windows do not agree on it
    return "worse" if change > 0 else "better"
