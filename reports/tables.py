"""Tables for the terminal, and how numbers are written everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from turbomill.reports.compare import Compared
from turbomill.reports.kv_policies import in_words
from turbomill.reports.plan import Fit
from turbomill.reports.runs import KvPolicy, LayerKv, ModelCard, Run, Score, Speed, TaskScore, Variant

if TYPE_CHECKING:
    from turbomill.reports.bench_store import StoreSpeed
    from turbomill.reports.list_runs import FoundRun


def show_bytes(value: float | None) -> str:
    """Bytes in decimal megabytes."""
    return "–" if value is None else f"{value / 1e6:,.1f} MB"


def number(value: float | None, digits: int) -> str:
    """A number, or a dash where nothing was measured."""
    return "–" if value is None else f"{value:,.{digits}f}"


def kl_text(value: float | None) -> str:
    """KL in four decimals. The reference against itself shows as zero, not as rounding of its cache."""
    return number(None if value is None else max(value, 0.0), 4)


def percent(value: float | None) -> str:
    """A share."""
    return "–" if value is None else f"{100 * value:.1f} %"


def percent_change(then: float, now: float) -> str:
    """What became of a number, as a share of it."""
    return "–" if then == 0 else f"{100 * (now / then - 1):+.1f} %"


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*row)
    return table


VARIANT_COLUMNS = ("variant", "perplexity", "KL", "top-1", "on disk", "peak memory", "decode tok/s")
KV_COLUMNS = ("KV bits", "bytes/token", "perplexity", "KL", "top-1", "decode tok/s", "sequences", "verdict")
SCORE_COLUMNS = ("model", "perplexity", "KL", "top-1", "top-5", "positions")
SPEED_COLUMNS = ("batch", "prompt", "output", "prefill tok/s", "decode tok/s")
MIXED_COLUMNS = ("mixed: prefill", "and decode")
LATENCY_COLUMNS = ("ms", "mean", "median", "p90", "p95", "p99")


def variant_row(variant: Variant) -> tuple[str, ...]:
    """For VARIANT_COLUMNS."""
    return (
        variant.name,
        number(variant.ppl, 3),
        kl_text(variant.kl),
        percent(variant.top1),
        show_bytes(variant.disk_bytes),
        show_bytes(variant.peak_bytes),
        number(variant.decode_tok_s, 1),
    )


def kv_row(policy: KvPolicy) -> tuple[str, ...]:
    """For KV_COLUMNS."""
    return (
        policy.name,
        number(policy.bytes_per_token, 0),
        number(policy.ppl, 3),
        kl_text(policy.kl),
        percent(policy.top1),
        number(policy.decode_tok_s, 1),
        number(policy.sequences, 0),
        policy.verdict or "–",
    )


def speed_row(speed: Speed) -> tuple[str, ...]:
    """For SPEED_COLUMNS."""
    sizes = (str(speed.batch), str(speed.prompt_tokens), str(speed.completion_tokens))
    return (*sizes, number(speed.prefill_tok_s, 1), number(speed.decode_tok_s, 1))


def speeds_cells(speeds: Sequence[Speed]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Columns and rows; those of mixed loads where some were measured."""
    rows = [speed_row(speed) for speed in speeds]
    if all(speed.mixed_decode_tok_s is None for speed in speeds):
        return SPEED_COLUMNS, rows
    mixed = [(number(s.mixed_prefill_tok_s, 1), number(s.mixed_decode_tok_s, 1)) for s in speeds]
    return (*SPEED_COLUMNS, *MIXED_COLUMNS), [a + b for a, b in zip(rows, mixed, strict=True)]


def latency_rows(load: dict[str, float | None]) -> list[tuple[str, ...]]:
    """For LATENCY_COLUMNS: one row per metric."""
    kinds = ("mean", "median", "p90", "p95", "p99")
    return [
        (name.upper(), *(number(load.get(f"{kind}_{name}_ms"), 1) for kind in kinds))
        for name in ("ttft", "tpot", "itl", "e2el")
    ]


def variants_table(variants: Sequence[Variant]) -> Table:
    """The demo's table."""
    return _table("Variants", VARIANT_COLUMNS, [variant_row(v) for v in variants])


def variants_kv_table(variants: Sequence[Variant]) -> Table:
    """Every variant under every KV policy."""
    rows = [(v.name, *kv_row(policy)) for v in variants for policy in v.kv.values()]
    return _table("KV cache", ("variant", *KV_COLUMNS), rows)


TASK_COLUMNS = ("task", "metric", "value", "standard error", "documents", "examples")


def task_row(score: TaskScore) -> tuple[str, ...]:
    """For TASK_COLUMNS. Of a group the harness knows no number of examples."""
    metric = score.metric if score.filter == "none" else f"{score.metric}, {score.filter}"
    return (
        f"{score.task} (group)" if score.group else score.task,
        metric,
        number(score.value, 4),
        number(score.stderr, 4),
        f"{score.documents:,}",
        "–" if score.fewshot is None else str(score.fewshot),
    )


def tasks_table(scores: Sequence[TaskScore]) -> Table:
    """`eval tasks`."""
    table = _table("Tasks", TASK_COLUMNS, [task_row(score) for score in scores])
    # Names are long, and their ends tell them apart.
    table.columns[0].overflow, table.columns[0].min_width = "fold", 24
    return table


LENGTH_COLUMNS = ("KV bits", "context", "perplexity", "KL", "passkey", "copy")
LAYER_COLUMNS = ("layer", "K outlier", "K in 8", "K in 4", "V in 8", "V in 4")


def length_rows(policies: Sequence[KvPolicy]) -> list[tuple[str, ...]]:
    """For LENGTH_COLUMNS: each policy at each length."""
    return [
        (
            *(policy.name, f"{at.tokens:,}", number(at.ppl, 3), kl_text(at.kl)),
            *(percent(at.passkey), percent(at.copied)),
        )
        for policy in policies
        for at in policy.by_length
    ]


def sensitivity_rows(layers: Sequence[LayerKv]) -> list[tuple[str, ...]]:
    """For LAYER_COLUMNS: the error of the attention's output, relative to its energy."""
    return [
        (
            *(str(row.layer), number(row.k_outlier, 1)),
            *(f"{error[bits]:.1e}" for error in (row.k_error, row.v_error) for bits in ("8", "4")),
        )
        for row in layers
    ]


def kv_sentences(run: Run) -> list[str]:
    """The verdicts, with their reasons, and what is recommended."""
    name = run.model.name if run.model else "the model"
    lines = []
    for policy in run.policies:
        if policy.quant_policy and policy.verdict is not None:
            why = f": {'; '.join(policy.reasons)}" if policy.reasons else ""
            lines.append(f"{in_words(policy)} in the KV cache of {name}: {policy.verdict}{why}.")
    if run.recommended is not None:
        lines.append(f"Recommended: {run.recommended['options']}.")
    return lines


def kv_tables(run: Run, outlier: float) -> list[RenderableType]:
    """`eval kv`: policies, lengths, the layers that stand out, and the verdict in sentences."""
    parts: list[RenderableType] = [
        _table("KV cache", KV_COLUMNS, [kv_row(policy) for policy in run.policies]),
        _table("By context length", LENGTH_COLUMNS, length_rows(run.policies)),
    ]
    large = [row for row in run.kv_layers if row.k_outlier > outlier]
    worst = sorted(run.kv_layers, key=lambda row: -row.k_error["4"] - row.v_error["4"])[:5]
    shown = large or worst
    if shown:
        title = "Layers with large channels in K" if large else "The five most sensitive layers"
        parts.append(_table(title, LAYER_COLUMNS, sensitivity_rows(shown)))
    return [*parts, *(Text(line) for line in kv_sentences(run))]


def score_table(model: ModelCard, score: Score) -> Table:
    """`eval ppl`."""
    row = (
        model.name,
        number(score.ppl, 4) + _between(score.ppl_ci, 4),
        kl_text(score.kl) + _between(score.kl_ci and (max(score.kl_ci[0], 0.0), max(score.kl_ci[1], 0.0)), 4),
        percent(score.top1),
        percent(score.top5),
        f"{score.positions:,}",
    )
    return _table("Score, with 95 % intervals", SCORE_COLUMNS, [row])


def worst_table(score: Score) -> Table:
    """The windows that `eval ppl` found worst."""
    rows = [
        (str(w.index), number(w.ppl, 3), kl_text(w.kl), percent(w.top1), escape(w.text)) for w in score.worst
    ]
    return _table("Worst windows", ("window", "perplexity", "KL", "top-1", "begins"), rows)


def _between(bounds: tuple[float, float] | None, digits: int) -> str:
    """An interval after its figure; nothing where there is none."""
    return "" if bounds is None else f" [{number(bounds[0], digits)}, {number(bounds[1], digits)}]"


def compared_table(rows: Sequence[Compared]) -> Table:
    """`eval compare`."""
    lines = []
    for row in rows:
        digits = 3 if row.metric == "nll" else 4
        change = row.difference
        lines.append(
            (
                escape(row.name),
                {"nll": "perplexity", "kl": "KL"}.get(row.metric, row.metric),
                number(row.value, digits),
                number(row.baseline_value, digits),
                f"{change.mean:+.4f} [{change.low:+.4f}, {change.high:+.4f}]",
                f"{row.p_value:.4f}",
                row.verdict,
            )
        )
    unit = " in nats" if rows[0].metric in ("nll", "kl") else ""
    title = escape(f"Against {rows[0].baseline}; differences{unit}, with 95 % intervals")
    columns = ("model", "by", "it", "baseline", "difference", "p", "verdict")
    return _table(title, columns, lines)


def plan_table(fits: Sequence[Fit]) -> Table:
    """`plan`: in binary units, as memory is sold."""
    asked = fits[0].needed_bytes is not None
    rows = []
    for fit in fits:
        row = [fit.weights, fit.kv, number(fit.weight_bytes / 2**30, 2), f"{fit.kv_bytes_per_token:,}"]
        row += [f"{fit.blocks:,}", f"{fit.sequences:,}"]
        if asked:
            needed, longest = fit.needed_bytes or 0, fit.longest_session or 0
            row += ["yes" if fit.fits else "no", number(needed / 2**30, 1), f"{longest:,}"]
        rows.append(row)
    columns = ("weights", "KV", "GiB", "KV B/token", "blocks", "sequences")
    return _table("Plan", [*columns, *(("fits", "needs GiB", "longest") if asked else ())], rows)


def runs_table(found: Sequence[FoundRun]) -> Table:
    """`runs`."""
    table = Table(title="Runs", title_justify="left", header_style="bold")
    for column in ("run", "kind", "status", "time", "says"):
        table.add_column(column, overflow="fold")
    for row in found:
        colour = "" if row.status == "complete" else "red"
        cells = (row.path, row.kind, row.status, row.time, row.says)
        table.add_row(*(Text(cell, colour) for cell in cells))
    return table


def speeds_table(speeds: Sequence[Speed]) -> Table:
    """`bench engine`."""
    return _table("Engine", *speeds_cells(speeds))


def store_table(speed: StoreSpeed) -> Table:
    """`bench store`."""
    source, store = speed.source_bytes / 1e9, speed.store_bytes / 1e9
    rows = [
        ("read the checkpoint", f"{speed.read_source_s:.2f}", f"{source / speed.read_source_s:.2f}", ""),
        ("copy the checkpoint", f"{speed.copy_s:.2f}", f"{source / speed.copy_s:.2f}", ""),
        (
            "convert it",
            f"{speed.convert_s:.2f}",
            f"{source / speed.convert_s:.2f}",
            f"{speed.convert_to_copy:.2f} of the copy's speed",
        ),
        ("read the store", f"{speed.read_store_s:.2f}", f"{store / speed.read_store_s:.2f}", ""),
        (
            "load it, to the first token",
            f"{speed.load_s:.2f}",
            f"{store / speed.load_s:.2f}",
            f"{speed.load_to_read:.2f} times the read",
        ),
    ]
    return _table(f"Store: {source:.2f} GB, {store:.2f} GB", ("", "seconds", "GB/s", ""), rows)


def serve_tables(run: Run) -> list[Table]:
    """`bench serve`: totals, then latencies."""
    tables: list[Table] = []
    for load in run.serve:
        totals = [
            ("completed requests", str(load["completed"])),
            ("failed requests", str(load["failed"])),
            ("of those rejected", str(load.get("rejected", 0))),
            ("answers of another length than asked for", str(load.get("lengths_missed", 0))),
            ("duration", f"{load['duration']:.2f} s"),
            ("requests/s", number(load["request_throughput"], 2)),
            ("output tokens/s", number(load["output_throughput"], 1)),
            ("total tokens/s", number(load["total_token_throughput"], 1)),
        ]
        if "request_goodput" in load:
            totals.append(("requests/s within the objectives", number(load["request_goodput"], 2)))
            totals.append(("requests within the objectives", percent(load["slo_share"])))
        rate = load["request_rate"]
        title = "Load, sent at once" if rate == "inf" else f"Load of {number(rate, 2)} requests/s"
        tables.append(_table(title, ("", "value"), totals))
        tables.append(_table("Latency", LATENCY_COLUMNS, latency_rows(load)))
    return tables
