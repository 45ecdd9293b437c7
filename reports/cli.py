"""`turbomill plan`, `report`, `sweep`, `runs`, `verify` and `demo`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import rich_click as click

from turbomill.commands import SETTINGS
from turbomill.reports.cli_options import THREADS


@click.command(context_settings=SETTINGS)
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--output", type=click.Path(path_type=Path), help="The page to write.  [report.html in the first RUN]"
)
@click.option(
    "--baseline",
    "baselines",
    multiple=True,
    type=click.Path(path_type=Path),
    help="A run of another day to compare with (repeatable): exit code 1 when a figure is worse.",
)
@click.option(
    "--quality-tolerance",
    default=0.01,
    show_default=True,
    help="Share by which scores and sizes may be worse.",
)
@click.option(
    "--speed-tolerance", default=0.05, show_default=True, help="Share by which speeds may be worse."
)
@click.option("--json", "as_json", is_flag=True, help="Print where the report is, and what changed, as JSON.")
def report(
    runs: tuple[Path, ...],
    output: Path | None,
    baselines: tuple[Path, ...],
    quality_tolerance: float,
    speed_tolerance: float,
    as_json: bool,
) -> None:
    """Render runs (directories with run.json) as one HTML page, with Markdown and JSON beside it.

    A RUN may also be a checkpoint that `turbomill lite` wrote: its table of linears becomes part of the page.
    """
    from dataclasses import asdict

    from turbomill import console
    from turbomill.reports.baseline import Tolerance, against
    from turbomill.reports.quant_log import is_quantization, load_quantization
    from turbomill.reports.render import write_report
    from turbomill.reports.runs import load_run

    console.setup_logging()
    tolerance = Tolerance(quality_tolerance, speed_tolerance)
    loaded = [load_quantization(path) if is_quantization(path) else load_run(path) for path in runs]
    changes = against(loaded, [load_run(path) for path in baselines], tolerance) if baselines else []
    first = runs[0] if runs[0].is_dir() else runs[0].parent
    html, markdown, data = write_report(loaded, output or first / "report.html", changes)
    worse = [change for change in changes if change.change == "worse"]
    if as_json:
        found = {"html": str(html), "markdown": str(markdown), "json": str(data)}
        console.emit_json({**found, "changes": [asdict(c) for c in changes]} if baselines else found)
    else:
        console.stdout.print(f"{html}\n{markdown}\n{data}", soft_wrap=True, markup=False, highlight=False)
        for c in worse:
            line = f"worse: {c.metric} of {c.name}: {c.then:.4f} before, {c.now:.4f} now"
            console.stdout.print(line, style="red", soft_wrap=True, markup=False, highlight=False)
    if worse:
        sys.exit(1)


@click.command(context_settings=SETTINGS)
@click.argument("recipes", metavar="RECIPES.yaml", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--work-dir",
    type=click.Path(path_type=Path),
    default=Path("sweep"),
    show_default=True,
    help="Everything goes here; what is unchanged is reused.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the variants as JSON on stdout.")
def sweep(recipes: Path, work_dir: Path, as_json: bool) -> None:
    """Quantize, convert, score and measure a grid of recipes, and leave a report.

    RECIPES.yaml names the model and the recipes; a list in the place of a value makes a grid
    (docs/evaluation.md). Started again, a sweep goes on where it was stopped. The exit code is 1 when a
    variant failed.
    """
    from turbomill import console
    from turbomill.reports.sweep import Sweeper
    from turbomill.reports.sweep_file import load_sweep

    console.setup_logging()
    sweeper = Sweeper(load_sweep(recipes), work_dir)
    run = sweeper.run()
    if as_json:
        variants = [variant.model_dump() for variant in run.variants]
        console.emit_json({"variants": variants, "failed": sweeper.failures})
    else:
        console.stdout.print(sweeper.table.render())
        for name, error in sweeper.failures.items():
            line = f"failed: {name}: {error}"
            console.stdout.print(line, style="red", soft_wrap=True, markup=False, highlight=False)
        console.stdout.print(f"report: {work_dir / 'report.html'}", soft_wrap=True, highlight=False)
    if sweeper.failures:
        sys.exit(1)


@click.command("runs", context_settings=SETTINGS)
@click.argument(
    "folders", metavar="[FOLDER]...", nargs=-1, type=click.Path(path_type=Path, exists=True, file_okay=False)
)
@click.option("--json", "as_json", is_flag=True, help="Print the list as JSON on stdout.")
def list_runs(folders: tuple[Path, ...], as_json: bool) -> None:
    """List the runs below FOLDER (the current one): what each measured, when, and whether it is whole."""
    from turbomill import console
    from turbomill.reports.list_runs import find_runs
    from turbomill.reports.tables import runs_table

    console.setup_logging()
    found = find_runs(folders or (Path(),))
    if as_json:
        console.emit_json([row.to_dict() for row in found])
    else:
        console.stdout.print(runs_table(found))


@click.command(context_settings=SETTINGS)
@click.argument("model")
@click.option("--gpu", required=True, help="A GPU such as H200, or its free memory, such as 80GiB.")
@click.option("--session-len", type=int, help="Tokens of one conversation.  [model's context]")
@click.option("--conversations", type=int, help="How many at a time: what holds them?")
@click.option("--w-group-size", "group", default=128, show_default=True, help="Channels that share a scale.")
@click.option(
    "--cache-max-entry-count",
    default="0.8",
    show_default=True,
    help="KV cache: a share of what the weights leave free, a size such as 20GiB, or a number of blocks.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON on stdout.")
def plan(
    model: str,
    gpu: str,
    session_len: int | None,
    conversations: int | None,
    group: int,
    cache_max_entry_count: str,
    as_json: bool,
) -> None:
    """Which weights and KV caches fit into a GPU, and how many sequences they hold; no weights are read.

    MODEL may be a config.json alone. The exit code is 1 when what is asked for does not fit.
    """
    from turbomill import console
    from turbomill.reports import plan as planner
    from turbomill.reports.memory import parse_memory, shape_of
    from turbomill.reports.tables import plan_table

    console.setup_logging()
    memory = parse_memory(gpu)
    shape = shape_of(model, group)
    demand = planner.Demand(memory, session_len or shape.context_length, conversations, cache_max_entry_count)
    fits = planner.plan(shape, demand)
    if as_json:
        console.emit_json(planner.plan_json(shape, demand, fits))
    else:
        console.stdout.print(plan_table(fits))
        console.stdout.print(planner.answer(shape, demand, fits), markup=False, highlight=False)
        for note in sorted({f"{fit.weights} bits: {fit.note}" for fit in fits if fit.note}):
            console.stdout.print(note, markup=False, highlight=False)
    if planner.choose(fits) is None:
        sys.exit(1)


@click.command(context_settings=SETTINGS)
@click.argument("store", type=click.Path(path_type=Path))
@click.option(
    "--against", metavar="MODEL", help="The checkpoint it was converted from: compare every tensor."
)
@click.option("--device", default="auto", show_default=True, help="Where the engine loads it.")
@click.option("--json", "as_json", is_flag=True, help="Print the checks as JSON on stdout.")
def verify(store: Path, against: str | None, device: str, as_json: bool) -> None:
    """Check a STORE before it is deployed: files, chat template, engine and, with --against, every tensor and
    the logits.

    The exit code is 1 when a check fails.
    """
    from dataclasses import asdict

    from rich.markup import escape

    from turbomill import console
    from turbomill.reports.verify import verify as run

    console.setup_logging()
    checks = run(store, against, device)
    good = all(check.ok for check in checks)
    if as_json:
        console.emit_json({"ok": good, "checks": [asdict(check) for check in checks]})
    else:
        for check in checks:
            mark = "[green]ok[/green]  " if check.ok else "[red]FAIL[/red]"
            console.stdout.print(f"{mark} {check.name}: {escape(check.detail)}", soft_wrap=True)
    if not good:
        sys.exit(1)


@click.command(context_settings=SETTINGS)
@click.option(
    "--work-dir",
    type=click.Path(path_type=Path),
    default=Path("demo"),
    show_default=True,
    help="Everything goes here; what is unchanged is reused.",
)
@click.option("--model", default="demo", show_default=True, help="Another MODEL than the built-in one.")
@click.option("--w-group-size", "group", default=64, show_default=True, help="Channels that share a scale.")
@click.option("--calib-samples", default=32, show_default=True, help="Windows of calibration text.")
@click.option("--calib-seqlen", default=512, show_default=True, help="Tokens per calibration window.")
@click.option("--windows", default=8, show_default=True, help="Windows of evaluation text.")
@click.option("--window-len", default=512, show_default=True, help="Tokens per evaluation window.")
@THREADS
@click.option("--json", "as_json", is_flag=True, help="Print the table and the answer as JSON on stdout.")
def demo(work_dir: Path, as_json: bool, **given: Any) -> None:
    """Quantize the built-in model three ways, convert, score, serve, ask, and leave a report."""
    from turbomill import console
    from turbomill.reports.demo import DemoOptions, demo_json, run_demo
    from turbomill.reports.tables import variants_kv_table, variants_table

    console.setup_logging()
    run = run_demo(work_dir, DemoOptions(**given))
    if as_json:
        console.emit_json(demo_json(run))
        return
    console.stdout.print(variants_table(run.variants))
    console.stdout.print(variants_kv_table(run.variants))
    console.stdout.print(f"{run.question}\n  {run.answer}", markup=False, highlight=False)
    console.stdout.print(f"report: {work_dir / 'report.html'}", soft_wrap=True, highlight=False)
