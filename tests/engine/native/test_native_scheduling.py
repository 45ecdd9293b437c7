"""The engine's orchestration: limits, stops, cancels, preemption, and that all memory comes back."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from native_engine import Native, store_of, tiny_llama

from turbomill import _core


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("scheduling") / "model"
    tiny_llama(path)
    return store_of(path)


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 320, length).tolist()


def settled(engine: Native) -> dict[str, Any]:
    """Metrics once nothing runs."""
    for _ in range(500):
        metrics = engine.engine.metrics().to_dict()
        if metrics["running"] == 0 and metrics["waiting"] == 0:
            return metrics
        time.sleep(0.01)
    raise AssertionError(metrics)


def all_blocks_back(metrics: dict[str, Any]) -> bool:
    return metrics["free_blocks"] + metrics["cached_blocks"] == metrics["total_blocks"]


def test_stop_token_ends_and_is_not_delivered(store: Any) -> None:
    with Native(store) as engine:
        free = engine.generate(prompt(20), 30)
        stop = free[10]
        first = free.index(stop)
        request = engine.submit(prompt(20), 30, stop_token_ids=[stop])
        assert engine.tokens(request) == free[:first]
        assert engine.finish(request) == "stop"
        assert all_blocks_back(settled(engine))


def test_length_limits(store: Any) -> None:
    with Native(store, session_len=40) as engine:
        request = engine.submit(prompt(30), 1000)
        assert len(engine.tokens(request)) == 10
        assert engine.finish(request) == "length"
        assert len(engine.generate(prompt(3), 1)) == 1
        full = engine.submit(prompt(40), 0, return_logits=True)
        assert engine.wait(full)[-1].finish_reason == "length"


@pytest.mark.parametrize(
    ("token_ids", "fields", "message"),
    [
        ([], {}, "empty"),
        ([320], {}, "vocabulary"),
        ([-1], {}, "vocabulary"),
        ([5] * 40, {}, "session_len"),
        ([5], {"temperature": -1.0}, "temperature"),
        ([5], {"top_p": 0.0}, "top_p"),
        ([5], {"top_k": -2}, "top_k"),
    ],
)
def test_requests_that_cannot_run_are_refused(
    token_ids: list[int], fields: Any, message: str, store: Any
) -> None:
    with Native(store, session_len=40) as engine, pytest.raises(ValueError, match=message):
        engine.submit(token_ids, **fields)


def test_a_request_larger_than_the_cache_is_refused(store: Any) -> None:
    with Native(store, cache_block_count=2) as engine:
        with pytest.raises(ValueError, match="needs 3 KV blocks, the cache has 2"):
            engine.submit(prompt(100), 50)
        assert len(engine.generate(prompt(100), 28)) == 28
        assert len(engine.logits(prompt(128))) == 128  # fills the cache to the last token


def test_wrong_configuration(store: Any) -> None:
    with pytest.raises(ValueError, match="quant_policy is 5"):
        Native(store, quant_policy=5)
    with pytest.raises(TypeError, match="unknown field 'block_size'"):
        _core.EngineConfig(block_size=3)


def test_cancel_while_running_and_while_waiting(store: Any) -> None:
    with Native(store, max_batch_size=1) as engine:
        running = engine.submit(prompt(10), 480)
        waiting = engine.submit(prompt(10, seed=1), 480)
        while not engine.outputs.get(running):
            time.sleep(0.001)
        engine.engine.cancel(waiting)
        assert engine.finish(waiting) == "cancelled"
        assert engine.tokens(waiting) == []
        engine.engine.cancel(running)
        assert engine.finish(running) == "cancelled"
        assert 0 < len(engine.tokens(running)) < 480
        engine.engine.cancel(running)  # again, and an unknown one: nothing happens
        engine.engine.cancel(10**9)
        assert all_blocks_back(settled(engine))
        assert len(engine.generate(prompt(5), 3)) == 3


def test_preemption_changes_no_text(store: Any) -> None:
    prompts = [prompt(30 + 7 * i, seed=i) for i in range(8)]
    with Native(store) as engine:
        alone = [engine.generate(p, 100) for p in prompts]
        sampled = engine.generate(prompts[0], 100, temperature=1.0, seed=3)
    with Native(store, cache_block_count=6) as engine:
        requests = [engine.submit(p, 100) for p in prompts]
        extra = engine.submit(prompts[0], 100, temperature=1.0, seed=3)
        assert [engine.tokens(r) for r in requests] == alone
        assert engine.tokens(extra) == sampled
        metrics = settled(engine)
        assert metrics["preemptions"] > 0
        assert all_blocks_back(metrics)


def test_logits_survive_preemption(store: Any) -> None:
    ids = prompt(120)
    with Native(store) as engine:
        expected = engine.logits(ids)
    with Native(store, cache_block_count=3, max_prefill_token_num=16) as engine:
        others = [engine.submit(prompt(60, seed=i), 100) for i in range(1, 4)]
        np.testing.assert_allclose(engine.logits(ids), expected, atol=1e-4)
        for request in others:
            assert len(engine.tokens(request)) == 100


def test_decodes_go_on_while_a_long_prompt_is_read(store: Any) -> None:
    with Native(store, max_prefill_token_num=8) as engine:
        stream = engine.submit(prompt(4), 400)
        while not engine.outputs.get(stream):
            time.sleep(0.001)
        long = engine.submit(prompt(400, seed=1), 4)
        engine.wait(long)
        first = next(i for i, (r, _) in enumerate(engine.order) if r == long)
        started = next(i for i, (r, _) in enumerate(engine.order) if r == stream)
        # 400 tokens at 8 a step are 50 steps, each of which also gave the stream a token.
        assert first - started >= 45
        engine.engine.cancel(stream)


def test_seeds(store: Any) -> None:
    with Native(store) as engine:
        same = [engine.submit(prompt(9), 20, temperature=1.0, seed=7) for _ in range(5)]
        other = engine.submit(prompt(9), 20, temperature=1.0, seed=8)
        texts = [engine.tokens(r) for r in same]
        assert all(text == texts[0] for text in texts)
        assert engine.tokens(other) != texts[0]


def test_close_cancels_and_refuses(store: Any) -> None:
    engine = Native(store)
    requests = [engine.submit(prompt(10, seed=i), 450) for i in range(10)]
    engine.close()
    assert {engine.finish(r) for r in requests} <= {"cancelled", "length"}
    with pytest.raises(RuntimeError, match="closed"):
        engine.submit(prompt(3))
    engine.close()


def test_many_clients_leave_nothing_behind(store: Any) -> None:
    """Random lengths and cancels, a tiny pool, sixteen threads: each request ends once, all blocks return."""
    with Native(store, cache_block_count=10, max_batch_size=6, max_prefill_token_num=40) as engine:
        failures: list[str] = []

        def client(number: int) -> None:
            rng = random.Random(number)
            for _ in range(12):
                request = engine.submit(prompt(rng.randint(1, 150), number), rng.randint(0, 60))
                if rng.random() < 0.4:
                    time.sleep(rng.random() * 0.01)
                    engine.engine.cancel(request)
                outputs = engine.wait(request)
                if sum(bool(o.finish_reason) for o in outputs) != 1 or outputs[-1].finish_reason == "error":
                    failures.append(outputs[-1].error or "ended twice")

        threads = [threading.Thread(target=client, args=(i,)) for i in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        metrics = settled(engine)
        assert all_blocks_back(metrics)
        assert metrics["healthy"]


def test_logits_that_are_not_finite_fail_that_request_alone(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    path = tmp_path / "nan"
    tiny_llama(path)
    weights = load_file(path / "model.safetensors")
    weights["model.embed_tokens.weight"][7] = float("nan")
    save_file(
        {k: v.to(torch.float32) for k, v in weights.items()}, path / "model.safetensors", {"format": "pt"}
    )
    with Native(store_of(path)) as engine:
        bad = engine.submit([5, 7, 6], 5)
        good = engine.submit([5, 6, 8], 5)
        assert engine.wait(bad)[-1].finish_reason == "error"
        assert "not finite" in engine.wait(bad)[-1].error
        assert len(engine.tokens(good)) == 5
