"""`turbomill eval ppl`: perplexity, and the distance to the unquantized model."""

from __future__ import annotations

import logging
from pathlib import Path

from turbomill.engine.kv_scheme import KvScheme
from turbomill.engine.stores import open_model
from turbomill.engine.turbomind import TurbomindEngine
from turbomill.errors import TurbomillError
from turbomill.reports.evaluation import (
    EvalOptions,
    References,
    check_comparable,
    describe_options,
    find_reference,
    journal_of,
    read_marker,
    score,
    with_worst,
)
from turbomill.reports.runs import Run, check_run_dir, model_card, new_run, save_run
from turbomill.reports.text import load_eval_windows

logger = logging.getLogger("turbomill.reports")


def evaluate_ppl(
    model: str,
    options: EvalOptions,
    *,
    reference: str | None = None,
    kv: KvScheme | None = None,
    work_dir: Path | None = None,
) -> Run:
    """Score MODEL; with `work_dir`, leave the run there, also a failed one.

    Without `reference`, the model that MODEL was quantized from is used where its makers recorded it.
    """
    kv = kv or KvScheme()
    if work_dir is not None:
        check_run_dir(work_dir)
    store = open_model(model)
    reference = reference or find_reference(model, store)
    if reference is None:
        logger.info("no reference: perplexity only (give --reference for KL and top-1 agreement)")
    reference_store = None if reference is None else open_model(reference)
    if reference_store is not None:
        check_comparable(store, reference_store, options.force)
    made = read_marker(model, store) or {}
    cut = load_eval_windows(store, options, made.get("calibration"))
    run = new_run(
        "ppl",
        describe_options(options, **kv.settings),
        model=model_card(model, store),
        reference=reference_store and model_card(str(reference), reference_store),
        windows=cut.describe(),
    )
    journal = journal_of(store, reference_store, cut, options, [kv])
    try:
        references = None if reference_store is None else References(reference_store, cut, options)
        if references is not None:
            references.prepare()
        with TurbomindEngine(store, options.engine_config(kv), reason="it is scored") as engine:
            part = f"policy{kv.quant_policy}"
            result = score(engine, cut, references, model, journal, part).score()
        run = run.model_copy(update={"score": with_worst(result, cut, store.tokenizer())})
    except TurbomillError as error:
        run = run.model_copy(update={"status": "failed", "error": str(error)})
        raise
    finally:
        if work_dir is not None and (run.score or run.error):
            save_run(run, work_dir)
    journal.finish()
    return run
