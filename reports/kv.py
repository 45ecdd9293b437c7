"""`turbomill eval kv`: what 8 and 4 bits in the KV cache cost and buy."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from turbomill import console
from turbomill.calib_data import Windows
from turbomill.convert.store import Store
from turbomill.engine.config import EngineConfig
from turbomill.engine.kv_scheme import KvScheme
from turbomill.engine.stores import open_model
from turbomill.engine.turbomind import TurbomindEngine
from turbomill.errors import TurbomillError, UsageError
from turbomill.reports.bench_engine import Load, measure
from turbomill.reports.evaluation import (
    EvalOptions,
    References,
    check_comparable,
    describe_options,
    journal_of,
    read_marker,
    score,
)
from turbomill.reports.journal import Journal
from turbomill.reports.kv_policies import EVALUATED, POLICIES
from turbomill.reports.kv_stats import measure_kv
from turbomill.reports.memory import shape_of
from turbomill.reports.plan import Demand, fit_scheme
from turbomill.reports.probes import ProbeScores, run_probes
from turbomill.reports.runs import (
    ByLength,
    KvPolicy,
    LayerKv,
    Run,
    Score,
    check_run_dir,
    model_card,
    new_run,
    save_run,
)
from turbomill.reports.scores import by_context
from turbomill.reports.text import load_eval_windows
from turbomill.reports.verdict import Thresholds, conclude, judge, sensitive_layers

logger = logging.getLogger("turbomill.reports")

DECODE = Load(batch=1, prompt_tokens=64, completion_tokens=32)
STATISTICS_WINDOWS, STATISTICS_LEN = 2, 512  # of the text, for the layers' sensitivity
SHORTEST = 256


@dataclass(frozen=True)
class KvOptions:
    """What is measured beside perplexity, and how it is judged."""

    policies: tuple[str, ...] = EVALUATED
    items: int = 3  # of each task, at each length (and depth); 0: no tasks
    rounds: int = 3  # of the decode measurement
    sensitivity: bool = True
    memory: int | None = None  # free bytes, for the number of sequences
    thresholds: Thresholds = field(default_factory=Thresholds)

    def __post_init__(self) -> None:
        if self.items < 0:
            raise UsageError(f"--items {self.items}: expected at least 0")
        if self.rounds < 1:
            raise UsageError(f"--test-round {self.rounds}: expected at least 1")


def context_lengths(longest: int) -> list[int]:
    """256, 512, ... up to `longest` tokens, which is always the last."""
    lengths = []
    length = SHORTEST
    while length < longest:
        lengths.append(length)
        length *= 2
    return [*lengths, longest]


def bytes_per_token(store: Store, kv: KvScheme, cache_dtype: str = "auto") -> float:
    """Bytes one token takes in the KV cache, all layers, scales and zeros included, by the native engine."""
    from turbomill import _core

    block = EngineConfig().cache_block_seq_len
    config = _core.EngineConfig(
        num_threads=1,
        max_batch_size=1,
        session_len=block,
        max_prefill_token_num=block,
        block_len=block,
        cache_block_count=1,
        **kv.settings,
        cache_dtype=store.manifest["dtype"] if cache_dtype == "auto" else cache_dtype,
    )
    return _core.cache_block_bytes(_core.ModelConfig(**store.model), config) / block


def kv_policy(
    store: Store,
    name: str,
    kv: KvScheme,
    result: Score,
    decode_tok_s: float | None,
    cache_dtype: str = "auto",
) -> KvPolicy:
    """A row of the table."""
    nbytes = bytes_per_token(store, kv, cache_dtype)
    return KvPolicy(
        name=name,
        quant_policy=kv.quant_policy,
        rotation=kv.rotated,
        layers_16bit=list(kv.layers_16bit),
        bytes_per_token=nbytes,
        bits_per_token=8 * nbytes,
        ppl=result.ppl,
        kl=result.kl,
        top1=result.top1,
        decode_tok_s=decode_tok_s,
        per_window=result.per_window,
    )


def decode_load(store: Store, window_len: int) -> Load:
    """The decode measurement that fits a session of `window_len` tokens."""
    room = min(window_len, store.context_length)
    if DECODE.prompt_tokens + DECODE.completion_tokens <= room:
        return DECODE
    return Load(1, max(room // 2, 1), max(room - room // 2, 2))


def evaluate_kv(
    model: str,
    options: EvalOptions,
    kv: KvOptions | None = None,
    *,
    reference: str | None = None,
    work_dir: Path | None = None,
) -> Run:
    """Score MODEL under each policy against policy 0 of `reference`, by default of MODEL itself."""
    kv = kv or KvOptions()
    if work_dir is not None:
        check_run_dir(work_dir)
    store = open_model(model)
    reference_store = store if reference is None else open_model(reference)
    if reference is not None:
        check_comparable(store, reference_store, options.force)
    made = read_marker(model, store) or {}
    cut = load_eval_windows(store, options, made.get("calibration"))
    run = new_run(
        "kv",
        describe_options(options, **asdict(kv)),
        model=model_card(model, store),
        reference=model_card(reference or model, reference_store),
        windows=cut.describe(),
    )
    rows: list[KvPolicy] = []
    schemes = {name: POLICIES[name].scheme for name in kv.policies}
    journal = journal_of(store, reference_store, cut, options, list(schemes.values()))
    try:
        references = References(reference_store, cut, options)
        references.prepare()
        layers = _sensitivity(store, cut) if kv.sensitivity else []
        for name, scheme in schemes.items():
            rows.append(_measure(model, store, name, scheme, cut, references, options, kv, journal))
        rows = _judged(rows, layers, kv.thresholds)
        if (more := mixed_scheme(store, rows, layers, kv.thresholds, options.cache_dtype)) is not None:
            name = f"4r+{len(more.layers_16bit)}"
            rows.append(_measure(model, store, name, more, cut, references, options, kv, journal))
            rows = _judged(rows, layers, kv.thresholds)
        verdict, recommended = conclude(rows)
        run = run.model_copy(update={"kv_layers": layers, "verdict": verdict, "recommended": recommended})
    except TurbomillError as error:
        run = run.model_copy(update={"status": "failed", "error": str(error)})
        raise
    finally:
        run = run.model_copy(update={"policies": rows})
        if work_dir is not None and (run.error or run.verdict):
            save_run(run, work_dir)
    journal.finish()
    return run


def _measure(
    model: str,
    store: Store,
    policy: str,
    scheme: KvScheme,
    cut: Windows,
    references: References,
    options: EvalOptions,
    kv: KvOptions,
    journal: Journal,
) -> KvPolicy:
    """One policy's row, not judged yet."""
    name = f"{model} KV {policy}"
    with TurbomindEngine(store, options.engine_config(scheme), reason="it is scored") as engine:
        load = decode_load(store, options.window_len)
        speed = measure(engine, load, store.model["vocab_size"], rounds=kv.rounds)
        tally = score(engine, cut, references, name, journal, f"policy-{policy}")
        lengths = context_lengths(options.window_len)
        tokenizer = store.tokenizer() if kv.items else None
        probes = [_no_probes() for _ in lengths]
        if tokenizer is not None:
            with console.progress(f"tasks {name}", len(lengths)) as task:
                for i, length in enumerate(lengths):
                    probes[i] = run_probes(engine, tokenizer, length, kv.items)
                    task.advance(note=f"{length} tokens")
    row = kv_policy(store, policy, scheme, tally.score(), speed.decode_tok_s, options.cache_dtype)
    contexts = by_context(tally.results, lengths)
    sequences = None
    if kv.memory is not None:
        demand = Demand(kv.memory, options.window_len)
        sequences = fit_scheme(shape_of(str(store.path)), demand, scheme).sequences
    return row.model_copy(
        update={
            "by_length": [
                ByLength(tokens=length, ppl=ppl, kl=kl, passkey=probe.passkey, copied=probe.copy)
                for length, (ppl, kl), probe in zip(lengths, contexts, probes, strict=True)
            ],
            "passkey": _mean([probe.passkey for probe in probes]),
            "copied": _mean([probe.copy for probe in probes]),
            "sequences": sequences,
        }
    )


def mixed_scheme(
    store: Store,
    rows: Sequence[KvPolicy],
    layers: Sequence[LayerKv],
    thresholds: Thresholds,
    cache_dtype: str = "auto",
) -> KvScheme | None:
    """Rotated int4 with the layers kept in 16 bits that make it safe, as their sensitivity has it.

    None when it is safe as it is, was not measured, or would take more than the smallest safe cache.
    """
    nibbles = next((row for row in rows if row.name == "4r"), None)
    base = next(row for row in rows if row.quant_policy == 0)
    if nibbles is None or nibbles.verdict == "safe" or not layers:
        return None
    kept = sensitive_layers(nibbles, base, layers, thresholds)
    if not kept:
        return None
    scheme = KvScheme(nibbles.quant_policy, True, kept)
    smallest = min(row.bytes_per_token for row in rows if row.verdict == "safe")
    return scheme if bytes_per_token(store, scheme, cache_dtype) < smallest else None


def _no_probes() -> ProbeScores:
    return ProbeScores(None, None)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _sensitivity(store: Store, cut: Windows) -> list[LayerKv]:
    if "hf_config" not in store.manifest:
        logger.warning("%s: an older store, without what the layers' statistics need: left out", store.path)
        return []
    return measure_kv(store, cut.ids[:STATISTICS_WINDOWS, :STATISTICS_LEN])


def _judged(rows: list[KvPolicy], layers: list[LayerKv], thresholds: Thresholds) -> list[KvPolicy]:
    base = next(row for row in rows if row.quant_policy == 0)
    judged = []
    for row in rows:
        verdict, reasons = judge(row, base, layers, thresholds)
        judged.append(row.model_copy(update={"verdict": verdict, "reasons": reasons}))
    return judged


def _named(row: dict[str, Any]) -> dict[str, Any]:
    """Accuracy in copying is "copy" to the outside; a record cannot have a field of that name."""
    if "by_length" in row:
        row["by_length"] = [_named(at) for at in row["by_length"]]
    return {"copy" if key == "copied" else key: value for key, value in row.items()}


def kv_json(run: Run) -> dict[str, Any]:
    """What `--json` prints; run.json has the rest."""
    keys = ("name", "bits_per_token", "ppl", "kl", "by_length", "passkey", "copy", "verdict")
    rows = [_named(policy.model_dump()) for policy in run.policies]
    return {
        "policies": [{key: row[key] for key in keys} for row in rows],
        "verdict": run.verdict,
        "recommended": run.recommended,
    }
