"""`turbomill bench`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click

from turbomill.commands import SETTINGS
from turbomill.engine.kv_scheme import KvScheme
from turbomill.engine.options import BACKEND, kv_options
from turbomill.reports.cli_options import OUTPUT, THREADS, IntList

if TYPE_CHECKING:
    from turbomill.reports.load_shapes import Distribution


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
@click.option(
    "--mixed", is_flag=True, help="Also while so many sequences decode and as many prompts more are read."
)
@click.option("--seed", default=0, show_default=True, help="Of the random prompts.")
@BACKEND
@kv_options
@THREADS
@OUTPUT
def engine(
    model: str,
    concurrency: tuple[int, ...],
    prompt_tokens: tuple[int, ...],
    completion_tokens: tuple[int, ...],
    test_round: int,
    warmup_round: int,
    kv: KvScheme,
    as_json: bool,
    **given: Any,
) -> None:
    """Prefill, decode and mixed tokens/s of the engine alone, over a grid of batch sizes and lengths."""
    from turbomill import console
    from turbomill.reports.bench_engine import Load, bench_engine
    from turbomill.reports.tables import speeds_table

    console.setup_logging()
    loads = [Load(b, p, c) for p in prompt_tokens for c in completion_tokens for b in concurrency]
    run = bench_engine(model, loads, rounds=test_round, warmup=warmup_round, kv=kv, **given)
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
    "--random-range-ratio",
    default=0.0,
    show_default=True,
    help="Lengths vary: uniform within this share of the mean; lognormal with this share as deviation.",
)
@click.option(
    "--length-distribution",
    type=click.Choice(["uniform", "lognormal"]),
    default="uniform",
    show_default=True,
    help="Of the lengths; lognormal has the long tail of real traffic.",
)
@click.option(
    "--random-prefix-len", default=0, show_default=True, help="Tokens with which all prompts begin alike."
)
@click.option(
    "--num-turns",
    default=1,
    show_default=True,
    help="Turns of each of the --num-prompts conversations; each repeats what was said before.",
)
@click.option(
    "--request-rate",
    type=float,
    default=math.inf,
    show_default=True,
    help="Requests/s of a Poisson process (open loop).",
)
@click.option(
    "--burstiness",
    default=1.0,
    show_default=True,
    help="Of the gaps (gamma distribution): below 1 requests come in bursts, 1 is Poisson.",
)
@click.option(
    "--dataset-path",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Conversations in ShareGPT's format, whose first questions are sent.",
)
@click.option(
    "--sharegpt-output-len", type=click.IntRange(1), help="Tokens per answer.  [the file's answers']"
)
@click.option("--tokenizer", help="With --base-url: MODEL whose tokenizer counts tokens of texts.")
@click.option(
    "--goodput",
    multiple=True,
    metavar="NAME:MS",
    help="An objective, such as ttft:500, tpot:50 or e2el:5000 (repeatable): requests/s that meet all.",
)
@click.option("--find-knee", is_flag=True, help="Search the highest rate that meets the objectives.")
@click.option("--slo-share", default=0.99, show_default=True, help="Share of requests that must meet them.")
@click.option("--knee-steps", default=6, show_default=True, help="Loads of the search.")
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
@BACKEND
@kv_options
@THREADS
@OUTPUT
def serve(
    model: str | None,
    base_url: str | None,
    served_name: str | None,
    api_key: str | None,
    random_input_len: int,
    random_output_len: int,
    random_range_ratio: float,
    length_distribution: Distribution,
    random_prefix_len: int,
    num_turns: int,
    kv: KvScheme,
    num_threads: int,
    backend: str,
    work_dir: Path | None,
    as_json: bool,
    dataset_path: Path | None,
    sharegpt_output_len: int | None,
    tokenizer: str | None,
    goodput: tuple[str, ...],
    find_knee: bool,
    slo_share: float,
    knee_steps: int,
    **given: Any,
) -> None:
    """Load a server over HTTP: TTFT, TPOT, ITL and end-to-end latency; JSON as `vllm bench serve` has it.

    Give MODEL to start a server for it, or --base-url of one that runs.
    """
    from turbomill import console
    from turbomill.reports.bench_serve import Knee, TraceFile, bench_serve
    from turbomill.reports.load_client import LoadOptions
    from turbomill.reports.load_shapes import Shape
    from turbomill.reports.slo import Slo
    from turbomill.reports.summary import knee_sentence
    from turbomill.reports.tables import serve_tables

    console.setup_logging()
    shape = Shape(random_range_ratio, length_distribution, random_prefix_len, num_turns)
    run = bench_serve(
        LoadOptions(input_len=random_input_len, output_len=random_output_len, shape=shape, **given),
        model=model,
        base_url=base_url,
        served_name=served_name,
        api_key=api_key,
        kv=kv,
        num_threads=num_threads,
        backend=backend,
        work_dir=work_dir,
        slo=Slo.parse(goodput),
        knee=Knee(slo_share, knee_steps) if find_knee else None,
        trace=None if dataset_path is None else TraceFile(dataset_path, sharegpt_output_len, tokenizer),
        tokenizer=tokenizer,
    )
    if as_json:
        console.emit_json(run.serve[0] if run.knee is None else {"knee": run.knee, "loads": run.serve})
    else:
        if run.knee is not None:
            console.stdout.print(knee_sentence(run.knee), markup=False, highlight=False)
        for table in serve_tables(run):
            console.stdout.print(table)
        for error in sorted({error for load in run.serve for error in load["errors"]}):
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
