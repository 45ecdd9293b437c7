"""`turbomill eval`, `bench`, `report` and `demo`."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click

from turbomill.commands import SETTINGS, options

if TYPE_CHECKING:
    from turbomill.reports.evaluation import EvalOptions
    from turbomill.reports.runs import Run


class IntList(click.ParamType):
    """Integers separated by commas."""

    name = "n,n,..."

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, ...]:
        """Read "1,8" as (1, 8)."""
        if isinstance(value, tuple):
            return value
        try:
            return tuple(int(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is not integers separated by commas, such as 1,8", param, ctx)


OUTPUT = options(
    click.option(
        "--work-dir",
        type=click.Path(path_type=Path),
        help="Leave run.json in this directory, for `turbomill report`.",
    ),
    click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on stdout."),
)
TEXT = options(
    click.option(
        "--reference", help="Unquantized model for KL and top-1: a store, checkpoint, GGUF file or demo."
    ),
    click.option(
        "--dataset",
        default="builtin",
        show_default=True,
        help="Evaluation text: builtin, a .txt, .jsonl or .parquet file or folder, or a hub set's name.",
    ),
    click.option("--windows", default=24, show_default=True, help="Windows of text."),
    click.option("--window-len", default=1024, show_default=True, help="Tokens per window."),
)
POLICY = click.option(
    "--quant-policy",
    type=click.Choice(["0", "8", "4"]),
    default="0",
    show_default=True,
    help="Bits of the KV cache; 0 keeps the model's dtype.",
)
THREADS = click.option("--num-threads", type=click.IntRange(0), default=0, help="CPU threads.  [every core]")


@click.group("eval", context_settings=SETTINGS)
def evaluate() -> None:
    """Score a model from the engine's own logits. MODEL is a store, or anything that converts to one."""


@evaluate.command()
@click.argument("model")
@TEXT
@POLICY
@THREADS
@OUTPUT
def ppl(
    model: str,
    reference: str | None,
    quant_policy: str,
    work_dir: Path | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Perplexity; with a reference, mean KL divergence and top-1 agreement.

    The model that MODEL was quantized from is the reference where turbomill recorded it.
    """
    from turbomill import console
    from turbomill.reports.perplexity import evaluate_ppl
    from turbomill.reports.tables import score_table

    console.setup_logging()
    options = _eval_options(given)
    run = evaluate_ppl(model, options, reference=reference, quant_policy=int(quant_policy), work_dir=work_dir)
    assert run.model is not None and run.score is not None
    if as_json:
        console.emit_json(_ppl_json(run))
    else:
        console.stdout.print(score_table(run.model, run.score))


@evaluate.command()
@click.argument("model", metavar="STORE")
@TEXT
@THREADS
@click.option("--test-round", default=3, show_default=True, help="Rounds of the decode measurement.")
@OUTPUT
def kv(
    model: str, reference: str | None, test_round: int, work_dir: Path | None, as_json: bool, **given: Any
) -> None:
    """The same with 16, 8 and 4 bits in the KV cache, with bytes per token and decode speed.

    The reference is STORE itself with an unquantized cache, unless --reference names another.
    """
    from turbomill import console
    from turbomill.reports.kv import evaluate_kv
    from turbomill.reports.tables import kv_table

    console.setup_logging()
    options = _eval_options(given)
    run = evaluate_kv(model, options, reference=reference, rounds=test_round, work_dir=work_dir)
    if as_json:
        console.emit_json({"policies": [policy.model_dump() for policy in run.policies]})
    else:
        console.stdout.print(kv_table(run.policies))


def _eval_options(given: dict[str, Any]) -> EvalOptions:
    from turbomill.reports.evaluation import EvalOptions

    return EvalOptions(**given)


def _ppl_json(run: Run) -> dict[str, Any]:
    assert run.score is not None
    return {
        "model": run.model and run.model.model_dump(),
        "reference": run.reference and run.reference.model_dump(),
        "windows": run.windows,
        **run.score.model_dump(),
    }


@click.group(context_settings=SETTINGS)
def bench() -> None:
    """Measure speed."""


@bench.command()
@click.argument("model")
@click.option(
    "--concurrency", type=IntList(), default="1,4,16", show_default=True, help="Sequences that run together."
)
@click.option("--prompt-tokens", type=IntList(), default="128", show_default=True, help="Prompt lengths.")
@click.option("--completion-tokens", type=IntList(), default="64", show_default=True, help="Output lengths.")
@click.option("--test-round", default=3, show_default=True, help="Rounds; the medians are shown.")
@click.option("--warmup-round", default=1, show_default=True, help="Rounds before, which do not count.")
@click.option("--seed", default=0, show_default=True, help="Of the random prompts.")
@POLICY
@THREADS
@OUTPUT
def engine(
    model: str,
    concurrency: tuple[int, ...],
    prompt_tokens: tuple[int, ...],
    completion_tokens: tuple[int, ...],
    test_round: int,
    warmup_round: int,
    quant_policy: str,
    as_json: bool,
    **given: Any,
) -> None:
    """Prefill and decode tokens/s of the engine alone, over a grid of batch sizes and lengths."""
    from turbomill import console
    from turbomill.reports.bench_engine import Load, bench_engine
    from turbomill.reports.tables import speeds_table

    console.setup_logging()
    loads = [Load(b, p, c) for p in prompt_tokens for c in completion_tokens for b in concurrency]
    run = bench_engine(
        model, loads, rounds=test_round, warmup=warmup_round, quant_policy=int(quant_policy), **given
    )
    if as_json:
        console.emit_json(
            {
                "model": run.model and run.model.model_dump(),
                "engine": [speed.model_dump() for speed in run.engine],
                "provenance": run.provenance,
            }
        )
    else:
        console.stdout.print(speeds_table(run.engine))


@bench.command()
@click.argument("model", required=False)
@click.option("--base-url", help="A running OpenAI-compatible server, such as http://127.0.0.1:23333.")
@click.option("--model-name", "served_name", help="Name at the server of --base-url.  [its first model]")
@click.option("--api-key", envvar="OPENAI_API_KEY", help="Bearer token.  [$OPENAI_API_KEY]")
@click.option("--num-prompts", default=32, show_default=True, help="Requests.")
@click.option("--random-input-len", default=128, show_default=True, help="Tokens per prompt.")
@click.option("--random-output-len", default=64, show_default=True, help="Tokens per answer.")
@click.option(
    "--request-rate",
    type=float,
    default=math.inf,
    show_default=True,
    help="Requests/s of a Poisson process (open loop).",
)
@click.option("--max-concurrency", type=int, help="Requests at a time (closed loop).  [no limit]")
@click.option(
    "--ignore-eos/--no-ignore-eos", default=True, show_default=True, help="Answers of exactly that length."
)
@click.option(
    "--vocab-size",
    default=1000,
    show_default=True,
    help="With --base-url, random prompts are token ids below this.",
)
@click.option("--seed", default=0, show_default=True, help="Of the prompts and of the Poisson process.")
@POLICY
@THREADS
@OUTPUT
def serve(
    model: str | None,
    base_url: str | None,
    served_name: str | None,
    api_key: str | None,
    random_input_len: int,
    random_output_len: int,
    quant_policy: str,
    num_threads: int,
    work_dir: Path | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Load a server over HTTP: TTFT, TPOT, ITL and end-to-end latency; JSON as `vllm bench serve` has it.

    Give MODEL to start a server for it, or --base-url of one that runs.
    """
    from turbomill import console
    from turbomill.reports.bench_serve import bench_serve
    from turbomill.reports.load_client import LoadOptions
    from turbomill.reports.tables import serve_tables

    console.setup_logging()
    run = bench_serve(
        LoadOptions(input_len=random_input_len, output_len=random_output_len, **given),
        model=model,
        base_url=base_url,
        served_name=served_name,
        api_key=api_key,
        quant_policy=int(quant_policy),
        num_threads=num_threads,
        work_dir=work_dir,
    )
    if as_json:
        console.emit_json(run.serve[0])
    else:
        for table in serve_tables(run):
            console.stdout.print(table)
        for error in sorted(set(run.serve[0]["errors"])):
            console.stderr.print(f"failed request: {error}", markup=False)


@bench.command("store")
@click.argument("model", required=False)
@click.option("--random", "shape", metavar="SHAPE", help="llama-3-8b or llama-3.2-1b, with random weights.")
@click.option("--w-bits", type=int, default=4, show_default=True, help="Of --random's linears: 4 or 16.")
@click.option("--device", default="auto", show_default=True, help="Where the engine loads the store.")
@click.option(
    "--work-dir",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="On the disk to measure; what is written there goes away again.  [the system's temporary folder]",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on stdout.")
def bench_the_store(
    model: str | None, shape: str | None, w_bits: int, device: str, work_dir: Path | None, as_json: bool
) -> None:
    """Conversion beside `cp -r`, loading beside a plain read: the same bytes, none of them cached.

    Give MODEL, a checkpoint, or --random.
    """
    from turbomill import console
    from turbomill.reports.bench_store import bench_random, bench_store
    from turbomill.reports.tables import store_table

    console.setup_logging()
    if (model is None) == (shape is None):
        raise click.UsageError("Give MODEL or --random, one of them.")
    if model is not None:
        speed = bench_store(model, work_dir, device)
    else:
        speed = bench_random(str(shape), w_bits, work_dir, device)
    if as_json:
        console.emit_json(speed.to_dict())
    else:
        console.stdout.print(store_table(speed))


@click.command(context_settings=SETTINGS)
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--output", type=click.Path(path_type=Path), help="The page to write.  [report.html in the first RUN]"
)
@click.option("--json", "as_json", is_flag=True, help="Print where the report is, as JSON.")
def report(runs: tuple[Path, ...], output: Path | None, as_json: bool) -> None:
    """Render runs (directories with run.json) as one HTML page, with Markdown beside it.

    A RUN may also be a checkpoint that `turbomill lite` wrote: its table of linears becomes part of the page.
    """
    from turbomill import console
    from turbomill.reports.quant_log import is_quantization, load_quantization
    from turbomill.reports.render import write_report
    from turbomill.reports.runs import load_run

    console.setup_logging()
    loaded = [load_quantization(path) if is_quantization(path) else load_run(path) for path in runs]
    first = runs[0] if runs[0].is_dir() else runs[0].parent
    html, markdown = write_report(loaded, output or first / "report.html")
    if as_json:
        console.emit_json({"html": str(html), "markdown": str(markdown)})
    else:
        console.stdout.print(f"{html}\n{markdown}", soft_wrap=True, markup=False, highlight=False)


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
