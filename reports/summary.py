"""The report's first lines: what the measurements say, in sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from turbomill.reports.kv_policies import in_words
from turbomill.reports.quant_log import sentence
from turbomill.reports.runs import KvPolicy, Run, TaskScore, Variant
from turbomill.reports.tables import kl_text, kv_sentences, number, percent

TASKS_TOLD = 6  # the others are in the table


@dataclass(frozen=True)
class Headline:
    """What decides, in a line: shown before everything else."""

    text: str
    tone: Literal["good", "bad", "plain"]


def headline(runs: Sequence[Run], worse: int = 0) -> Headline | None:
    """Failures first, then regressions, the verdict on the KV cache, the closest quantized variant."""
    failed = [run for run in runs if run.status == "failed"]
    if failed:
        return Headline(f"{len(failed)} of {len(runs)} runs failed.", "bad")
    if worse:
        return Headline(f"{worse} figures are worse than the baseline's.", "bad")
    judged = [run for run in runs if run.verdict is not None]
    if judged:
        told = [f"{run.model.name if run.model else 'the model'}: {run.verdict}" for run in judged]
        good = all(run.verdict == "safe" for run in judged)
        bad = any(run.verdict == "do not use" for run in judged)
        tone: Literal["good", "bad", "plain"] = "good" if good else "bad" if bad else "plain"
        return Headline(f"A quantized KV cache for {'; '.join(told)}.", tone)
    variants = [v for run in runs for v in run.variants]
    base = next((v for v in variants if v.model.scheme is None), None)
    ranked = sorted((v for v in variants if v.model.scheme and v.kl is not None), key=lambda v: v.kl or 0.0)
    if base is None or not ranked:
        return None
    best = ranked[0]
    size = percent(best.disk_bytes / base.disk_bytes)
    text = f"{best.name} stays closest to {base.name}: KL {kl_text(best.kl)} at {size} of its size."
    return Headline(text, "plain")


def summarize_runs(runs: Sequence[Run]) -> list[str]:
    """Sentences about every run, failures first."""
    lines = [f"FAILED: {run.kind}: {run.error}" for run in runs if run.status == "failed"]
    for run in runs:
        if run.status == "failed":
            continue
        if run.layers:
            lines.append(sentence(run))
        lines += _variants(run.variants)
        if run.score is not None and run.model is not None:
            lines.append(_score(run))
        if run.tasks:
            lines.append(_tasks(run))
        if run.policies and run.model is not None:
            lines += kv_sentences(run)
            lines += _policies(run.model.name, run.policies)
        if run.engine:
            best = max(run.engine, key=lambda speed: speed.decode_tok_s)
            name = run.model.name if run.model else "the engine"
            lines.append(
                f"{name} decodes at most {number(best.decode_tok_s, 1)} tokens/s, "
                f"with {best.batch} sequences."
            )
        if run.knee is not None:
            lines.append(knee_sentence(run.knee))
        else:
            lines += [_load(load) for load in run.serve]
    return lines


def _variants(variants: Sequence[Variant]) -> list[str]:
    base = next((v for v in variants if v.model.scheme is None), None)
    compared = [v for v in variants if v.model.scheme is not None and v.kl is not None]
    if base is None or not compared:
        return []
    ranked = sorted(compared, key=lambda v: v.kl or 0.0)
    best, others = ranked[0], ranked[1:]
    against = " and ".join(f"{kl_text(v.kl)} for {v.name}" for v in others)
    lines = [
        f"Of the quantized variants, {best.name} stays closest to {base.name}: KL {kl_text(best.kl)}"
        + (f" (against {against})" if against else "")
        + f", the same most likely token at {percent(best.top1)} of the positions, "
        f"perplexity {number(best.ppl, 2)} against {number(base.ppl, 2)}."
    ]
    text = f"{best.name} takes {percent(best.disk_bytes / base.disk_bytes)} of {base.name}'s bytes on disk"
    if best.peak_bytes and base.peak_bytes:
        text += f" and {percent(best.peak_bytes / base.peak_bytes)} of its peak memory"
    if best.decode_tok_s and base.decode_tok_s:
        text += f", and decodes {number(best.decode_tok_s / base.decode_tok_s, 2)} times as fast"
    lines.append(text + ".")
    return lines + _policies(best.name, list(best.kv.values()))


def _policies(name: str, policies: Sequence[KvPolicy]) -> list[str]:
    base = next((p for p in policies if p.quant_policy == 0), None)
    if base is None:
        return []
    lines = []
    for policy in policies:
        if policy is base:
            continue
        text = (
            f"With {in_words(policy)} in the KV cache {name} takes "
            f"{percent(policy.bytes_per_token / base.bytes_per_token)} of the bytes per token; "
            f"perplexity goes from {number(base.ppl, 3)} to {number(policy.ppl, 3)}"
        )
        if policy.kl is not None and base.kl is not None:
            text += f", KL from {kl_text(base.kl)} to {kl_text(policy.kl)}"
        lines.append(text + ".")
    return lines


def _tasks(run: Run) -> str:
    """The first metric of every group, and of every task that is in none."""
    groups = [row for row in run.tasks if row.group]
    shown: dict[str, TaskScore] = {}
    for row in groups or run.tasks:
        shown.setdefault(row.task, row)
    told = [
        f"{row.task} {row.metric} {number(row.value, 3)}"
        + ("" if row.stderr is None else f" (standard error {number(row.stderr, 3)})")
        for row in shown.values()
    ]
    return f"{run.model.name if run.model else 'The model'}: {'; '.join(told[:TASKS_TOLD])}" + (
        f"; and {len(told) - TASKS_TOLD} more." if len(told) > TASKS_TOLD else "."
    )


def _score(run: Run) -> str:
    assert run.model is not None and run.score is not None
    text = f"{run.model.name}: perplexity {number(run.score.ppl, 3)}"
    if run.score.kl is not None and run.reference is not None:
        text += (
            f"; KL {kl_text(run.score.kl)} and the same most likely token at {percent(run.score.top1)} "
            f"of the positions, against {run.reference.name}"
        )
    return text + "."


def knee_sentence(knee: dict[str, Any]) -> str:
    """The highest rate that met the objectives."""
    limits = " and ".join(
        f"{name.upper()} of at most {limit:g} ms" for name, limit in knee["goodput"].items()
    )
    share = percent(knee["share"])
    if knee["request_rate"] is None:
        return f"No rate that was tried gave {share} of the requests a {limits}."
    return f"Up to {number(knee['request_rate'], 2)} requests/s, {share} of the requests have a {limits}."


def _load(load: dict[str, object]) -> str:
    total = int(load["completed"]) + int(load["failed"])  # type: ignore[call-overload]
    return (
        f"The server of {load['model_id']} answered {load['completed']} of {total} requests: "
        f"{number(load['output_throughput'], 1)} output tokens/s, "  # type: ignore[arg-type]
        f"median time to first token {number(load['median_ttft_ms'], 0)} ms."  # type: ignore[arg-type]
    )
