"""What a report shows, gathered from runs: the same for the page and for Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from turbomill.reports.baseline import Changed
from turbomill.reports.plots import Plot
from turbomill.reports.plots_lines import kv_by_length, layer_loss, rate_latency
from turbomill.reports.plots_pareto import quality_speed, size_quality
from turbomill.reports.quant_log import COLUMNS as LAYER_COLUMNS
from turbomill.reports.quant_log import NOTE as LAYER_NOTE
from turbomill.reports.quant_log import layer_rows
from turbomill.reports.runs import Run, Variant
from turbomill.reports.summary import Headline, headline, summarize_runs
from turbomill.reports.tables import (
    KV_COLUMNS,
    LATENCY_COLUMNS,
    LENGTH_COLUMNS,
    TASK_COLUMNS,
    VARIANT_COLUMNS,
    kv_row,
    latency_rows,
    length_rows,
    number,
    percent_change,
    sensitivity_rows,
    speeds_cells,
    task_row,
    variant_row,
)
from turbomill.reports.tables import LAYER_COLUMNS as SENSITIVITY


@dataclass(frozen=True)
class TableView:
    """One table: the first column names the row."""

    title: str
    note: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    best: frozenset[int] = frozenset()  # rows to set off
    bad: frozenset[int] = frozenset()  # rows in red


@dataclass(frozen=True)
class Fact:
    """One line of provenance."""

    name: str
    text: str


@dataclass(frozen=True)
class RunView:
    """Where a run's numbers come from."""

    title: str
    facts: tuple[Fact, ...]


@dataclass(frozen=True)
class ReportView:
    """The report."""

    title: str
    verdict: Headline | None
    summary: list[str]
    changes: list[TableView]
    tables: list[TableView]
    plots: list[Plot]
    kv_tables: list[TableView]
    kv_plots: list[Plot]
    speed_tables: list[TableView]
    speed_plots: list[Plot]
    layer_tables: list[TableView]
    layer_plots: list[Plot]
    dialogues: list[tuple[str, str]]
    runs: list[RunView]


SCORE_NOTE = (
    "Perplexity, KL and top-1 come from the engine's own logits. KL is the mean over positions of "
    "KL(reference ‖ variant) in nats; top-1 is the share of positions with the same most likely token; "
    "decode speed is of one sequence."
)
CHANGE_COLUMNS = ("model", "figure", "baseline", "now", "change", "verdict")
CHANGE_NOTE = (
    "Worse or better: by more than the tolerance and, where both scored the same windows of text, by more "
    "than chance (paired bootstrap, p below 0.05)."
)
LENGTH_NOTE = (
    "Positions whose context is longer than the length above and at most this one. Passkey: a five-digit "
    "number found again in so many tokens; copy: lines of code repeated exactly."
)
SENSITIVITY_NOTE = (
    "Outlier: the largest channel of K over the median one of its head. The others: error of the attention's "
    "output, relative to its energy, when K alone, or V alone, is rounded."
)
TASK_NOTE = (
    "Tasks of lm-evaluation-harness. The standard error says how much a value would move with other "
    "documents of the same kind; whether two models differ, `turbomill eval compare` tells by pairs of them."
)
KV_NOTE = "Bytes per token count keys and values of all layers, with the scales and zeros of 8 and 4 bits."


def report_view(
    runs: Sequence[Run], title: str = "Turbomill report", changes: Sequence[Changed] = ()
) -> ReportView:
    """Gather `runs`, in order; `changes` are theirs against a baseline."""
    variants = [variant for run in runs for variant in _variants(run)]
    plots = [plot for plot in (size_quality(variants), quality_speed(variants)) if plot is not None]
    return ReportView(
        title=title,
        verdict=headline(runs, sum(c.change == "worse" for c in changes)),
        summary=[*_change_sentences(changes), *(summarize_runs(runs) or ["Nothing was measured."])],
        changes=[_change_table(changes)] if changes else [],
        tables=[
            *([_variant_table(variants)] if variants else []),
            *(_task_table(run) for run in runs if run.tasks),
        ],
        plots=plots,
        kv_tables=_kv_tables(runs, variants),
        kv_plots=[
            plot
            for i, run in enumerate(runs)
            if (plot := kv_by_length(run.policies, _model_name(run), i)) is not None
        ],
        speed_tables=[table for run in runs for table in _speed_tables(run)],
        speed_plots=[plot for i, run in enumerate(runs) if (plot := _rate_plot(run, i)) is not None],
        layer_plots=[
            plot
            for i, run in enumerate(runs)
            if (plot := layer_loss(run.layers, _quantization(run), i)) is not None
        ],
        layer_tables=[_layer_table(run) for run in runs if run.layers],
        dialogues=[(run.question, run.answer) for run in runs if run.question and run.answer is not None],
        runs=[_run_view(number + 1, run) for number, run in enumerate(runs)],
    )


def _model_name(run: Run) -> str:
    return run.model.name if run.model else "model"


def _quantization(run: Run) -> str:
    return run.model.name if run.model else str(run.provenance.get("method", "quantized"))


def _change_sentences(changes: Sequence[Changed]) -> list[str]:
    if not changes:
        return []
    worse = [f"{c.metric} of {c.name}" for c in changes if c.change == "worse"]
    if not worse:
        return [f"Against the baseline none of {len(changes)} figures is worse."]
    count = f"{len(worse)} of {len(changes)} figures"
    return [f"REGRESSION: against the baseline {count} are worse: {'; '.join(worse)}."]


def _change_table(changes: Sequence[Changed]) -> TableView:
    rows = tuple(
        (c.name, c.metric, number(c.then, 4), number(c.now, 4), percent_change(c.then, c.now), c.change)
        for c in changes
    )
    bad = frozenset(i for i, c in enumerate(changes) if c.change == "worse")
    return TableView("Against the baseline", CHANGE_NOTE, CHANGE_COLUMNS, rows, bad=bad)


def _variants(run: Run) -> list[Variant]:
    """A scored model is a variant too, of which less is known."""
    if run.score is None or run.model is None:
        return list(run.variants)
    score, model = run.score, run.model
    return [
        Variant(
            name=model.name,
            model=model,
            ppl=score.ppl,
            kl=score.kl,
            top1=score.top1,
            disk_bytes=model.disk_bytes,
            peak_bytes=None,
            decode_tok_s=None,
            kv={},
        )
    ]


def _variant_table(variants: Sequence[Variant]) -> TableView:
    columns = (VARIANT_COLUMNS[0], "scheme", *VARIANT_COLUMNS[1:])
    rows = []
    for variant in variants:
        name, *figures = variant_row(variant)
        rows.append((name, variant.model.scheme or "dense", *figures))
    ranked = [(v.kl, i) for i, v in enumerate(variants) if v.kl is not None and v.model.scheme]
    best = frozenset({min(ranked)[1]} if len(ranked) > 1 else ())
    return TableView("Variants", SCORE_NOTE, columns, tuple(rows), best)


def _task_table(run: Run) -> TableView:
    name = _model_name(run)
    rows = tuple(task_row(score) for score in run.tasks)
    return TableView(f"Tasks, {name}", TASK_NOTE, TASK_COLUMNS, rows)


def _kv_tables(runs: Sequence[Run], variants: Sequence[Variant]) -> list[TableView]:
    tables = []
    rows = [(v.name, *kv_row(policy)) for v in variants for policy in v.kv.values()]
    if rows:
        tables.append(TableView("KV cache by variant", KV_NOTE, ("variant", *KV_COLUMNS), tuple(rows)))
    for run in runs:
        if run.policies:
            name = _model_name(run)
            rows = [kv_row(policy) for policy in run.policies]
            tables.append(TableView(f"KV cache of {name}", KV_NOTE, KV_COLUMNS, tuple(rows)))
            if rows := length_rows(run.policies):
                title = f"KV cache of {name} by context length"
                tables.append(TableView(title, LENGTH_NOTE, LENGTH_COLUMNS, tuple(rows)))
        if run.kv_layers:
            rows = sensitivity_rows(run.kv_layers)
            tables.append(TableView("K and V of each layer", SENSITIVITY_NOTE, SENSITIVITY, tuple(rows)))
    return tables


def _speed_tables(run: Run) -> list[TableView]:
    tables = []
    if run.engine:
        name = _model_name(run)
        note = f"Medians of {run.engine[0].rounds} rounds; tokens/s of all sequences together."
        if any(speed.mixed_decode_tok_s is not None for speed in run.engine):
            note += " Mixed: while so many sequences decode, as many prompts more are read."
        columns, rows = speeds_cells(run.engine)
        tables.append(TableView(f"Engine, {name}", note, columns, tuple(rows)))
    for load in run.serve:
        pace = (
            "as fast as possible"
            if load["request_rate"] == "inf"
            else f"{float(load['request_rate']):.3g} requests/s"
        )
        limit = f", at most {load['max_concurrency']} at a time" if load["max_concurrency"] else ""
        note = (
            f"{load['completed']} requests completed and {load['failed']} failed{_missed(load)} in "
            f"{number(load['duration'], 1)} s, sent {pace}{limit}: {number(load['output_throughput'], 1)} "
            "output tokens/s. Latencies in milliseconds."
        )
        rows = tuple(latency_rows(load))
        tables.append(TableView(f"Server, {load['model_id']}, {pace}", note, LATENCY_COLUMNS, rows))
    return tables


def _missed(load: dict[str, Any]) -> str:
    """What went wrong beside failures; runs of older versions do not say."""
    parts = []
    if load.get("rejected"):
        parts.append(f"{load['rejected']} of them rejected")
    if load.get("lengths_missed"):
        parts.append(f"{load['lengths_missed']} answers of another length than asked for")
    if load.get("server_stopped"):
        parts.append("the server stopped")
    return f" ({', '.join(parts)})" if parts else ""


def _rate_plot(run: Run, number: int) -> Plot | None:
    return rate_latency(run.serve, None if run.knee is None else run.knee["request_rate"], number)


def _layer_table(run: Run) -> TableView:
    title = f"Linears, {_quantization(run)}"
    return TableView(title, LAYER_NOTE, LAYER_COLUMNS, tuple(layer_rows(run.layers)))


def _run_view(index: int, run: Run) -> RunView:
    made = run.provenance
    machine, versions = made.get("machine", {}), made.get("versions", {})
    facts = [
        Fact("status", run.status + (f": {run.error}" if run.error else "")),
        Fact("command", str(made.get("command", ""))),
        Fact("time", str(made.get("time", ""))),
        Fact("machine", f"{machine.get('cpu')}, {machine.get('cores')} cores, {machine.get('system')}"),
        Fact("versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
        Fact("settings", ", ".join(f"{key} {value}" for key, value in made.get("settings", {}).items())),
    ]
    if run.windows:
        facts.append(Fact("text", ", ".join(f"{key} {value}" for key, value in run.windows.items())))
    for label, card in (("model", run.model), ("reference", run.reference)):
        if card is not None:
            facts.append(
                Fact(label, f"{card.name}, {card.architecture}, {card.scheme or 'dense'}, {card.fingerprint}")
            )
    facts += [
        Fact(f"variant {v.name}", f"{v.model.scheme or 'dense'}, {v.model.fingerprint}") for v in run.variants
    ]
    return RunView(f"Run {index}: {run.kind.replace('_', ' ')}", tuple(f for f in facts if f.text))
