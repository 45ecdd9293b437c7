"""Many clients on a tiny pool: random texts, rules, cancels, sleeps.

It needs the core alone, so that it can run under a sanitizer (`make sanitize`):

    python stress.py dump model.json
    LD_PRELOAD=libtsan.so python stress.py run model.json --core build/.../_core.so --seconds 60 --clients 64
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

RULES: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "top_k": 20},
    {"temperature": 1.2, "min_p": 0.05, "logprobs": 3},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.3},
    {"bad_words": [[7], [8, 9]], "min_new_tokens": 4, "stop_token_ids": [2, 30, 31]},
    {"prompt_logprobs": 1, "priority": 1},
    {"allowed_token_ids": list(range(40, 200)), "priority": -1},
    {"guided": True, "temperature": 1.0, "max_new_tokens": 40},
]


class Clients:
    """Submits from any number of threads and waits for what comes back."""

    def __init__(self, core: Any, model: dict[str, Any], tensors: list[list[Any]], **config: Any) -> None:
        self.core = core
        self.arrived = threading.Condition()
        self.words = -(-model["vocab_size"] // 32)
        self.guided: set[int] = set()
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, list[str]] = {}
        self.engine = core.Engine(
            core.ModelConfig(**model),
            [core.TensorRef(*tensor) for tensor in tensors],
            core.EngineConfig(**config),
            self.on_outputs,
        )

    def submit(self, request: dict[str, Any]) -> int:
        with self.arrived:  # its first token may be there at once
            number = self.engine.submit(self.core.Request(**request))
            if request.get("guided"):
                self.guided.add(number)
                self.engine.allow(number, 0, self.mask(0))
        return number

    def mask(self, position: int) -> bytes:
        """Every second token, in turn."""
        return bytes([0x55 << position % 2]) * (4 * self.words)

    def on_outputs(self, outputs: list[Any]) -> None:
        with self.arrived:
            for output in outputs:
                self.tokens.setdefault(output.id, []).extend(output.token_ids)
                if output.id in self.guided and not output.finish_reason:
                    position = len(self.tokens[output.id])
                    self.engine.allow(output.id, position, self.mask(position))
                if output.finish_reason:
                    self.ends.setdefault(output.id, []).append(output.finish_reason + output.error)
            self.arrived.notify_all()

    def wait(self, number: int) -> tuple[list[int], str]:
        with self.arrived:
            assert self.arrived.wait_for(lambda: number in self.ends, 300), f"request {number} starves"
            return self.tokens.get(number, []), self.ends[number][0]


def work_list(vocab: int, count: int) -> list[dict[str, Any]]:
    """Requests that share beginnings of all lengths."""
    rng = random.Random(0)
    stems = [[rng.randrange(3, vocab) for _ in range(120)] for _ in range(3)]
    return [
        {
            "token_ids": rng.choice(stems)[: rng.randrange(1, 120)]
            + [rng.randrange(3, vocab) for _ in range(rng.randrange(3))],
            "max_new_tokens": rng.randrange(60),
            "seed": number,
            **rng.choice(RULES),
        }
        for number in range(count)
    ]


def stress(
    core: Any, model: dict[str, Any], tensors: list[list[Any]], *, seconds: float, clients: int
) -> dict[str, Any]:
    """Run for `seconds`; AssertionError for a wrong text, a request that starves, a block that is lost."""
    work = work_list(model["vocab_size"], 40)
    roomy = {"cache_dtype": "float32", "session_len": 256, "num_threads": 2, "block_len": 16}
    alone = Clients(core, model, tensors, cache_block_count=100, enable_prefix_caching=False, **roomy)
    expected = [alone.wait(alone.submit(request)) for request in work]
    alone.engine.close()

    all_of_them = Clients(
        core, model, tensors, cache_block_count=24, max_batch_size=6, max_prefill_token_num=48, **roomy
    )
    end = time.monotonic() + seconds
    failures: list[str] = []
    counts = {"done": 0, "cancelled": 0, "sleeps": 0}

    def client(number: int) -> None:
        rng = random.Random(number)
        while time.monotonic() < end and not failures:
            which = rng.randrange(len(work))
            request = all_of_them.submit(work[which])
            if rng.random() < 0.3:
                time.sleep(rng.random() * 0.02)
                all_of_them.engine.cancel(request)
            tokens, finish = all_of_them.wait(request)
            text, reason = expected[which]
            if finish == "cancelled":
                counts["cancelled"] += 1
                good = tokens == text[: len(tokens)]
            else:
                counts["done"] += 1
                good = (tokens, finish) == (text, reason)
            if not good:
                failures.append(f"request {which} gave {tokens} {finish}, expected {text} {reason}")

    def control() -> None:
        rng = random.Random(-1)
        while time.monotonic() < end:
            time.sleep(rng.random() * seconds / 4)
            all_of_them.engine.sleep(rng.choice((1, 2)))
            counts["sleeps"] += 1
            all_of_them.engine.metrics()
            all_of_them.engine.wake()

    threads = [threading.Thread(target=client, args=(i,)) for i in range(clients)]
    threads.append(threading.Thread(target=control))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    while all_of_them.engine.metrics().running:
        time.sleep(0.01)
    metrics = all_of_them.engine.metrics().to_dict()
    all_of_them.engine.close()
    assert not failures, failures[0]
    assert all(len(reasons) == 1 for reasons in all_of_them.ends.values()), "a request ended twice"
    assert metrics["free_blocks"] + metrics["cached_blocks"] == metrics["total_blocks"]
    assert metrics["healthy"] and metrics["waiting"] == 0
    return counts | {name: metrics[name] for name in ("steps", "preemptions", "evictions", "cached_tokens")}


def description(store: Any) -> dict[str, Any]:
    """A store as the core takes it."""
    tensors = [
        [t.name, t.layout, t.dtype, list(t.shape), str(t.path), t.offset, t.nbytes]
        for t in store.tensors.values()
    ]
    return {"model": store.model, "tensors": tensors}


def dump(path: Path) -> None:
    """Write a tiny random model's store beside `path`, and there how the core takes it."""
    from native_engine import store_of, tiny_llama

    tiny_llama(path.with_suffix(""))
    path.write_text(json.dumps(description(store_of(path.with_suffix("")))))


def load_core(path: Path | None) -> Any:
    """The native module at `path`, without the package around it; None: the installed one."""
    if path is None:
        from turbomill import _core

        return _core
    spec = importlib.util.spec_from_file_location("turbomill._core", path)
    assert spec is not None
    assert spec.loader is not None
    core = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(core)
    return core


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("action", choices=("dump", "run"))
    parser.add_argument("model", type=Path)
    parser.add_argument("--core", type=Path)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--clients", type=int, default=64)
    options = parser.parse_args()
    if options.action == "dump":
        dump(options.model)
        return
    import scipy_openblas64

    core = load_core(options.core)
    core.load_blas(str(Path(scipy_openblas64.get_lib_dir()) / scipy_openblas64.get_library(fullname=True)))
    found = json.loads(options.model.read_text())
    result = stress(core, found["model"], found["tensors"], seconds=options.seconds, clients=options.clients)
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
