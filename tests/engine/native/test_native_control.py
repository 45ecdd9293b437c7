"""Pause, sleep and wake, and how a hung engine is told from a busy one."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from native_engine import Native, store_of, tiny_llama
from test_native_scheduling import prompt, settled
from test_native_states import MODEL

from turbomill import _core
from turbomill.engine.config import EngineConfig
from turbomill.engine.turbomind import TurbomindEngine, tensor_refs
from turbomill.errors import UsageError


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path: Path = tmp_path_factory.mktemp("control") / "model"
    tiny_llama(path)
    return store_of(path)


def test_a_paused_engine_takes_requests_in_and_runs_none(store: Any) -> None:
    with Native(store) as engine:
        expected = [engine.generate(prompt(20, seed=i), 100) for i in range(2)]
        running = engine.submit(prompt(20, seed=0), 100)
        while not engine.outputs.get(running):
            time.sleep(0.001)
        engine.engine.pause()
        metrics = engine.engine.metrics()
        assert metrics.paused and metrics.steps_in_flight == 0
        waiting = engine.submit(prompt(20, seed=1), 100)
        cancelled = engine.submit(prompt(20, seed=2), 100)
        engine.engine.cancel(cancelled)
        assert engine.finish(cancelled) == "cancelled"
        time.sleep(0.05)
        assert engine.engine.metrics().steps == metrics.steps
        engine.engine.resume()
        assert [engine.tokens(running), engine.tokens(waiting)] == expected
        assert not engine.engine.metrics().paused


@pytest.mark.parametrize("level", [1, 2])
def test_what_ran_goes_on_after_sleep(store: Any, level: int) -> None:
    """With the same text, although every block was given up."""
    with Native(store) as engine:
        fields = {"temperature": 1.0, "seed": 4, "frequency_penalty": 0.2, "logprobs": 1}
        expected = engine.generate(prompt(150), 200, **fields)
        requests = [engine.submit(prompt(150), 200, **fields) for _ in range(3)]
        for _ in range(3):
            time.sleep(0.01)
            engine.engine.sleep(level)
            metrics = engine.engine.metrics()
            assert metrics.free_blocks == metrics.total_blocks and metrics.running == 0
            assert metrics.paused
            engine.engine.wake()
        assert [engine.tokens(r) for r in requests] == [expected] * 3
        assert settled(engine)["healthy"]


def test_a_sleeping_cache_holds_no_memory(store: Any) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    with Native(store, cache_block_count=4096, block_len=512, session_len=512) as engine:
        # 2 layers, K and V, 2 heads of 16 fp32: a block of 512 tokens is 256 KiB.
        requests = [engine.submit(prompt(505, seed=i), 1) for i in range(200)]
        for request in requests:
            engine.wait(request)
        before = resident()
        engine.engine.sleep(1)
        assert before - resident() > 200 * (1 << 18) * 0.8
        engine.engine.wake()
        assert len(engine.generate(prompt(20), 5)) == 5


def refs(store: Any) -> list[Any]:
    return tensor_refs(store, _core)


@pytest.mark.parametrize("state", ["running", "paused", "asleep"])
def test_new_weights_without_a_new_engine(store: Any, state: str, tmp_path: Path) -> None:
    """What came before is of the old weights, what comes after of the new, whatever the cache remembers."""
    tiny_llama(tmp_path / "other", seed=5)
    other = store_of(tmp_path / "other")
    with Native(other) as engine:
        expected = engine.generate(prompt(150), 40)
    with Native(store) as engine:
        before = engine.generate(prompt(150), 40)
        assert before != expected
        if state != "running":
            engine.engine.pause() if state == "paused" else engine.engine.sleep(2)
        engine.engine.update(refs(other))
        assert engine.engine.metrics().paused == (state != "running")
        if state != "running":
            engine.engine.resume() if state == "paused" else engine.engine.wake()
        assert engine.generate(prompt(150), 40) == expected
        running = engine.submit(prompt(100, seed=1), 300)
        engine.engine.update(refs(store))
        assert len(engine.tokens(running)) == 300  # it went on
        assert engine.generate(prompt(150), 40) == before
        with pytest.raises(RuntimeError, match=r"norm\.weight"):
            engine.engine.update([ref for ref in refs(store) if ref.name != "norm.weight"])
        assert engine.generate(prompt(150), 40) == before
        assert settled(engine)["healthy"]


def test_new_weights_must_be_of_the_same_form(store: Any, tmp_path: Path) -> None:
    tiny_llama(tmp_path / "small", vocab_size=300)
    tiny_llama(tmp_path / "half", torch.float16)
    small, half = store_of(tmp_path / "small"), store_of(tmp_path / "half")
    ids = prompt(20)
    with TurbomindEngine(store, EngineConfig(device="cpu", session_len=128)) as engine:
        before = asyncio.run(engine.logits(ids))
        with pytest.raises(UsageError, match=r"another model \(vocab_size differ\)"):
            engine.update_params(small)
        with pytest.raises(UsageError, match=r"is stored in another form"):
            engine.update_params(half.path)
        engine.update_params(store.path)
        assert np.array_equal(asyncio.run(engine.logits(ids)), before)


def test_sleep_checks_its_level_and_close_ends_a_pause(store: Any) -> None:
    engine = Native(store)
    with pytest.raises(ValueError, match="level of sleep is 3"):
        engine.engine.sleep(3)
    engine.engine.pause()
    request = engine.submit(prompt(5), 5)
    engine.close()
    assert engine.finish(request) == "cancelled"
    with pytest.raises(RuntimeError, match="closed"):
        engine.engine.resume()


def test_commands_and_requests_from_many_threads(store: Any) -> None:
    with Native(store, cache_block_count=12, max_batch_size=4) as engine:
        expected = engine.generate(prompt(30), 40)
        stop = threading.Event()

        def control() -> None:
            while not stop.is_set():
                engine.engine.pause()
                engine.engine.resume()
                engine.engine.sleep(1)
                engine.engine.wake()

        threads = [threading.Thread(target=control) for _ in range(3)]
        for thread in threads:
            thread.start()
        requests = [engine.submit(prompt(30), 40) for _ in range(12)]
        time.sleep(0.3)
        stop.set()
        for thread in threads:
            thread.join()
        assert [engine.tokens(r) for r in requests] == [expected] * 12


def test_a_step_that_does_not_end_is_seen() -> None:
    model, config = _core.ModelConfig(**MODEL), _core.EngineConfig(cache_block_count=4)
    during, after, idle = _core.harness.stalled_seconds(model, config, 0.3)
    assert 0.2 < during < 5
    assert after < 0.2
    assert idle == 0
