"""`turbomill eval kv`: what 8 and 4 bits in the KV cache cost and buy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from turbomill.convert.store import Store
from turbomill.engine.config import EngineConfig
from turbomill.engine.stores import open_model
from turbomill.engine.turbomind import TurbomindEngine
from turbomill.errors import TurbomillError
from turbomill.reports.bench_engine import Load, measure
from turbomill.reports.evaluation import (
    EvalOptions,
    References,
    check_comparable,
    describe_options,
    read_marker,
    score,
)
from turbomill.reports.runs import KvPolicy, Run, Score, check_run_dir, model_card, new_run, save_run
from turbomill.reports.text import load_eval_windows

POLICIES = (0, 8, 4)
DECODE = Load(batch=1, prompt_tokens=64, completion_tokens=32)


def bits_name(quant_policy: int) -> str:
    """Bits per element as reports call them: policy 0 keeps 16."""
    return str(quant_policy or 16)


def bytes_per_token(store: Store, quant_policy: int, cache_dtype: str = "auto") -> float:
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
        quant_policy=quant_policy,
        cache_dtype=store.manifest["dtype"] if cache_dtype == "auto" else cache_dtype,
    )
    return _core.cache_block_bytes(_core.ModelConfig(**store.model), config) / block


def kv_policy(
    store: Store, quant_policy: int, result: Score, decode_tok_s: float | None, cache_dtype: str = "auto"
) -> KvPolicy:
    """A row of the table."""
    nbytes = bytes_per_token(store, quant_policy, cache_dtype)
    return KvPolicy(
        name=bits_name(quant_policy),
        quant_policy=quant_policy,
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
    *,
    policies: Sequence[int] = POLICIES,
    reference: str | None = None,
    rounds: int = 3,
    work_dir: Path | None = None,
) -> Run:
    """Score MODEL under each policy against policy 0 of `reference`, by default of MODEL itself."""
    if work_dir is not None:
        check_run_dir(work_dir)
    store = open_model(model)
    reference_store = store if reference is None else open_model(reference)
    if reference is not None:
        check_comparable(store, reference_store)
    made = read_marker(model, store) or {}
    cut = load_eval_windows(store, options, made.get("calibration"))
    run = new_run(
        "kv",
        describe_options(options, policies=list(policies)),
        model=model_card(model, store),
        reference=model_card(reference or model, reference_store),
        windows=cut.describe(),
    )
    rows: list[KvPolicy] = []
    try:
        references = References(reference_store, cut, options)
        references.prepare()
        for policy in policies:
            with TurbomindEngine(store, options.engine_config(policy), reason="it is scored") as engine:
                load = decode_load(store, options.window_len)
                speed = measure(engine, load, store.model["vocab_size"], rounds=rounds)
                result = score(engine, cut, references, f"{model} KV {bits_name(policy)}").score()
            rows.append(kv_policy(store, policy, result, speed.decode_tok_s, options.cache_dtype))
    except TurbomillError as error:
        run = run.model_copy(update={"status": "failed", "error": str(error)})
        raise
    finally:
        run = run.model_copy(update={"policies": rows})
        if work_dir is not None and (run.error or len(rows) == len(policies)):
            save_run(run, work_dir)
    return run
