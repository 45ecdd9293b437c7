"""`turbomill eval`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click

from turbomill.commands import SETTINGS
from turbomill.engine.kv_scheme import KvScheme
from turbomill.engine.options import kv_options
from turbomill.reports.cli_options import OUTPUT, TEXT, THREADS

if TYPE_CHECKING:
    from turbomill.reports.evaluation import EvalOptions
    from turbomill.reports.runs import Run


@click.group("eval", context_settings=SETTINGS)
def evaluate() -> None:
    """Score a model from the engine's own logits. MODEL is a store, or anything that converts to one."""


@evaluate.command()
@click.argument("model")
@TEXT
@kv_options
@THREADS
@OUTPUT
def ppl(
    model: str,
    reference: str | None,
    kv: KvScheme,
    work_dir: Path | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Perplexity with its 95 % interval; with a reference, mean KL divergence, top-1 and top-5 agreement.

    The model that MODEL was quantized from is the reference where turbomill recorded it.
    """
    from turbomill import console
    from turbomill.reports.perplexity import evaluate_ppl
    from turbomill.reports.tables import score_table, worst_table

    console.setup_logging()
    options = _eval_options(given)
    run = evaluate_ppl(model, options, reference=reference, kv=kv, work_dir=work_dir)
    assert run.model is not None and run.score is not None
    if as_json:
        console.emit_json(_ppl_json(run))
    else:
        console.stdout.print(score_table(run.model, run.score))
        if run.score.worst:
            console.stdout.print(worst_table(run.score))


@evaluate.command()
@click.argument("model", metavar="STORE")
@TEXT
@click.option(
    "--policies",
    default="0,16,8,k8v4r,4,4r",
    show_default=True,
    help="The caches to measure, beside 0, as --quant-policy spells them; r: rotated.",
)
@click.option("--items", default=3, show_default=True, help="Of each task at each length.  [0: no tasks]")
@click.option("--gpu", help="H200, 80GiB, ...: how many sequences of --window-len tokens fit there.")
@click.option(
    "--sensitivity/--no-sensitivity", default=True, show_default=True, help="Measure K and V of each layer."
)
@click.option("--kl-safe", default=0.01, show_default=True, help="KL beyond the 16-bit cache's that is safe.")
@click.option("--kl-max", default=0.1, show_default=True, help="KL above which it is not to be used.")
@click.option("--drop-safe", default=0.05, show_default=True, help="Lost accuracy in a task that is safe.")
@click.option("--drop-max", default=0.2, show_default=True, help="Lost accuracy above which it is not used.")
@click.option(
    "--outlier",
    default=20.0,
    show_default=True,
    help="A channel of K so many times the median one: 4 bits are not safe.",
)
@click.option(
    "--test-round", "rounds", default=3, show_default=True, help="Rounds of the decode measurement."
)
@THREADS
@OUTPUT
def kv(
    model: str,
    reference: str | None,
    policies: str,
    items: int,
    gpu: str | None,
    sensitivity: bool,
    kl_safe: float,
    kl_max: float,
    drop_safe: float,
    drop_max: float,
    outlier: float,
    rounds: int,
    work_dir: Path | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Whether the KV cache may have 8 or 4 bits: perplexity, KL, passkey and copying by context length.

    The reference is STORE itself with an unquantized cache, unless --reference names another. The exit code
    is 0 when a quantized cache is safe, 3 when the best one needs a test first, 4 when none is to be used.
    """
    from turbomill import console
    from turbomill.reports.kv import KvOptions, evaluate_kv, kv_json
    from turbomill.reports.kv_policies import parse_policies
    from turbomill.reports.memory import parse_memory
    from turbomill.reports.tables import kv_tables
    from turbomill.reports.verdict import EXIT_CODES, Thresholds

    console.setup_logging()
    wanted = KvOptions(
        policies=parse_policies(policies),
        items=items,
        rounds=rounds,
        sensitivity=sensitivity,
        memory=None if gpu is None else parse_memory(gpu),
        thresholds=Thresholds(kl_safe, kl_max, drop_safe, drop_max, outlier),
    )
    run = evaluate_kv(model, _eval_options(given), wanted, reference=reference, work_dir=work_dir)
    assert run.verdict is not None
    if as_json:
        console.emit_json(kv_json(run))
    else:
        for part in kv_tables(run, outlier):
            console.stdout.print(part)
    if code := EXIT_CODES[run.verdict]:
        sys.exit(code)


@evaluate.command()
@click.argument("model", required=False)
@click.option(
    "--tasks",
    default="turbomill_offline",
    show_default=True,
    help="Names of lm-evaluation-harness tasks, groups or tags, separated by commas.",
)
@click.option("--limit", type=float, help="Documents of each task, or a share of them below 1.  [all]")
@click.option("--num-fewshot", type=int, help="Examples before each question.  [the task's own]")
@click.option("--apply-chat-template", is_flag=True, help="Ask through the model's chat template.")
@click.option("--add-bos-token", is_flag=True, help="Begin every text with the tokenizer's special tokens.")
@click.option("--include-path", type=click.Path(path_type=Path), help="A folder with task YAML of your own.")
@click.option("--batch-size", default=16, show_default=True, help="Requests at a time.")
@click.option("--session-len", type=int, help="Tokens of one request.  [model's context]")
@click.option("--base-url", help="Ask this OpenAI-compatible server; MODEL then gives the tokenizer.")
@click.option("--model-name", "served_name", help="Name at the server of --base-url.  [its first model]")
@click.option("--list", "list_them", is_flag=True, help="Print the names of all tasks and groups.")
@kv_options
@THREADS
@OUTPUT
def tasks(
    model: str | None,
    tasks: str,
    list_them: bool,
    kv: KvScheme,
    work_dir: Path | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Tasks of lm-evaluation-harness, with standard errors: any of its own, or three that need no download.

    turbomill_copy: exact copies of identifiers, edited code and quotes; turbomill_passkey: a number found
    again in 128 to 1024 words (also _2048 and _4096); turbomill_arithmetic; turbomill_offline: all three.
    """
    from turbomill import console
    from turbomill.reports.harness.find import require_harness, task_names
    from turbomill.reports.tables import tasks_table
    from turbomill.reports.tasks import TaskOptions, evaluate_tasks

    console.setup_logging()
    if list_them:
        require_harness()
        click.echo("\n".join(task_names(given["include_path"])))
        return
    if model is None:
        raise click.UsageError("Missing argument 'MODEL'.")
    names = tuple(name.strip() for name in tasks.split(","))
    options = TaskOptions(tasks=names, kv=kv, **given)
    run = evaluate_tasks(model, options, work_dir=work_dir)
    if as_json:
        rows = [row.model_dump(exclude={"items", "items_sha256"}) for row in run.tasks]
        console.emit_json({"model": run.model and run.model.model_dump(), "tasks": rows})
    else:
        console.stdout.print(tasks_table(run.tasks))


@evaluate.command()
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on stdout.")
def compare(runs: tuple[Path, ...], as_json: bool) -> None:
    """Whether scored models differ by more than chance: each beside the first.

    RUN is the --work-dir of `eval ppl` or `eval kv`, all on the same windows of text, or of `eval tasks`, all
    on the same documents. By paired bootstrap over windows or documents, with Holm's correction when there
    are several.
    """
    from turbomill import console
    from turbomill.reports.compare import compare as compare_models
    from turbomill.reports.compare import compared_json, scored_models
    from turbomill.reports.compare_tasks import compare_tasks, compared_tasks_json
    from turbomill.reports.runs import load_run
    from turbomill.reports.tables import compared_table

    console.setup_logging()
    loaded = [load_run(path) for path in runs]
    if any(run.tasks for run in loaded):
        rows = compare_tasks(runs, loaded)
        found = compared_tasks_json(runs, loaded, rows) if as_json else {}
    else:
        models = scored_models(runs)
        rows = compare_models(models)
        found = compared_json(models, rows) if as_json else {}
    if as_json:
        console.emit_json(found)
    else:
        console.stdout.print(compared_table(rows))


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
