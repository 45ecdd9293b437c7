"""Whole engines: output tokens a second of streams, prompts and a queue of requests."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from turbomill import _core
from turbomill.reports.bench_gpu.random_model import RandomModel

OFFLINE = Path(__file__).with_name("offline500.json")
WORKLOADS = ("stream", "16", "64", "256", "prefill", "offline")


class Engine:
    """The native engine on a GPU, with requests of random tokens that run to their full length."""

    def __init__(self, model: RandomModel, quant_policy: int, device: str) -> None:
        self._done = threading.Condition()
        self._open = 0
        self._errors: list[str] = []
        self._vocab = model.model["vocab_size"]
        settings: dict[str, Any] = {
            "device": device,
            "max_batch_size": 256,
            "session_len": 8192,
            "max_prefill_token_num": 8192,
            "block_len": 64,
            "quant_policy": quant_policy,
            "cache_dtype": model.dtype,
        }
        config = _core.ModelConfig(**model.model)
        block = _core.cache_block_bytes(config, _core.EngineConfig(**settings, cache_block_count=1))
        blocks = (40 << 30) // block
        self.engine = _core.Engine(
            config, model.tensors, _core.EngineConfig(**settings, cache_block_count=blocks), self._on_outputs
        )

    def _on_outputs(self, outputs: list[_core.Output]) -> None:
        ended = [o for o in outputs if o.finish_reason]
        if not ended:
            return
        with self._done:
            self._open -= len(ended)
            self._errors += [o.error or o.finish_reason for o in ended if o.finish_reason != "length"]
            self._done.notify_all()

    def run(self, lengths: list[tuple[int, int]]) -> float:
        """Seconds until requests of (prompt, output) tokens, queued at once, are all complete."""
        rng = np.random.default_rng()
        requests = [
            _core.Request(token_ids=rng.integers(3, self._vocab, prompt).tolist(), max_new_tokens=new)
            for prompt, new in lengths
        ]
        with self._done:
            self._open += len(requests)
        start = time.perf_counter()
        for request in requests:
            self.engine.submit(request)
        with self._done:
            self._done.wait_for(lambda: self._open == 0)
        if self._errors:
            raise RuntimeError(f"a request failed: {self._errors[0]}")
        return time.perf_counter() - start


def measure(
    model: RandomModel, quant_policy: int, device: str, runs: int, workloads: Sequence[str] = WORKLOADS
) -> dict[str, Any]:
    """The peers' workloads; medians of `runs` runs after a short one (offline: one run)."""
    engine = Engine(model, quant_policy, device)

    def median(lengths: list[tuple[int, int]]) -> float:
        engine.run([(prompt, min(new, 8)) for prompt, new in lengths])
        return float(np.median([engine.run(lengths) for _ in range(runs)]))

    result: dict[str, Any] = {}
    for workload in workloads:
        if workload == "stream":
            seconds = median([(128, 512)]) - median([(128, 1)])
            result["single_stream_decode_tok_s"] = 511 / seconds
        elif workload == "prefill":
            result["prefill"] = {"prompt_tok_s": 8 * 4096 / median([(4096, 1)] * 8)}
        elif workload == "offline":
            lengths = [tuple(pair) for pair in json.loads(OFFLINE.read_text())["lengths"]]
            seconds = engine.run(lengths)
            new_tokens = sum(new for _, new in lengths)
            result["offline"] = {"req_s": len(lengths) / seconds, "out_tok_s": new_tokens / seconds}
        else:
            streams = int(workload)
            seconds = median([(512, 256)] * streams)
            result[f"b{streams}"] = {"out_tok_s": streams * 256 / seconds}
    metrics = engine.engine.metrics()
    result["metrics"] = metrics.to_dict()
    engine.engine.close()
    return result
