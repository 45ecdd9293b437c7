"""`turbomill eval`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click

from turbomill.commands import SETTINGS
from turbomill.reports.cli_options import OUTPUT, POLICY, TEXT, THREADS

if TYPE_CHECKING:
    from turbomill.reports.evaluation import EvalOptions
    from turbomill.reports.runs import Run


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
    """Perplexity with its 95 % interval; with a reference, mean KL divergence, top-1 and top-5 agreement.

    The model that MODEL was quantized from is the reference where turbomill recorded it.
    """
    from turbomill import console
    from turbomill.reports.perplexity import evaluate_ppl
    from turbomill.reports.tables import score_table, worst_table

    console.setup_logging()
    options = _eval_options(given)
    run = evaluate_ppl(model, options, reference=reference, quant_policy=int(quant_policy), work_dir=work_dir)
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


@evaluate.command()
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on stdout.")
def compare(runs: tuple[Path, ...], as_json: bool) -> None:
    """Whether scored models differ by more than chance: each beside the first.

    RUN is the --work-dir of `eval ppl` or `eval kv`; all on the same windows of text. By paired bootstrap
    over windows, with Holm's correction when there are several.
    """
    from turbomill import console
    from turbomill.reports.compare import compare as compare_models
    from turbomill.reports.compare import compared_json, scored_models
    from turbomill.reports.tables import compared_table

    console.setup_logging()
    models = scored_models(runs)
    rows = compare_models(models)
    if as_json:
        console.emit_json(compared_json(models, rows))
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
