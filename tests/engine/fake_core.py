"""A double of `turbomill._core`: the contract's threads and callbacks around simple arithmetic.

The next token follows from the previous one and the seed, so that every expectation can be computed by hand:
greedy counts upwards, printable ASCII only; sampling walks by seed-dependent steps.
"""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import ClassVar

import numpy as np

FIRST, COUNT = 97, 26  # "a" to "z"
STEP_SECONDS = 0.002
CACHED = 3  # prompt tokens that it says it had


def cpu_features() -> dict[str, bool]:
    return {"int8": False}


def next_token(previous: int, position: int, temperature: float, seed: int) -> int:
    step = 1 if temperature == 0 else 1 + (seed * 7919 + position * 104729 + 13) % (COUNT - 1)
    return FIRST + (previous - FIRST + step) % COUNT


def build_info():
    return {"backends": ["cpu"], "isa": ["fake"], "compiler": "none"}


def load_blas(path: str) -> None:
    assert path


class ModelConfig(SimpleNamespace):
    pass


class EngineConfig(SimpleNamespace):
    pass


class TensorRef:
    def __init__(self, *fields):
        self.fields = fields


class Request(SimpleNamespace):
    def __init__(self, **fields):
        defaults = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "seed": 0, "stop_token_ids": []}
        super().__init__(
            **(defaults | {"return_logits": False, "logprobs": -1, "prompt_logprobs": -1} | fields)
        )


def cache_block_bytes(model, config) -> int:
    return config.block_len * 1024


class Engine:
    """Every step gives each running request one token; `max_batch_size` requests run, the others wait."""

    instances: ClassVar[list[Engine]] = []

    def __init__(self, model, tensors, config, on_outputs):
        self.model, self.tensors, self.config, self.on_outputs = model, tensors, config, on_outputs
        self.lock = threading.Condition()
        self.waiting: list[SimpleNamespace] = []
        self.running: list[SimpleNamespace] = []
        self.cancelled: set[int] = set()
        self.requests: list[Request] = []
        self.next_id, self.steps, self.closing = 1, 0, False
        self.fail_next: str | None = None
        self.finished: list[str] = []
        self.paused, self.stalled_seconds = False, 0.0
        self.calls: list[tuple] = []  # of control
        self.thread = threading.Thread(target=self._loop, daemon=True)
        self.thread.start()
        Engine.instances.append(self)

    def submit(self, request) -> int:
        needed = -(-(len(request.token_ids) + 1) // self.config.block_len)
        if needed > self.config.cache_block_count:
            raise ValueError(
                f"the request needs {needed} blocks, the cache has {self.config.cache_block_count}"
            )
        with self.lock:
            if self.closing:
                raise RuntimeError("the engine is closed")
            self.requests.append(request)
            state = SimpleNamespace(id=self.next_id, request=request, last=request.token_ids[-1], count=0)
            state.mask = None  # of a guided request: not there, or the bytes of the next one
            self.next_id += 1
            self.waiting.append(state)
            self.lock.notify()
            return state.id

    def cancel(self, request_id: int) -> None:
        with self.lock:
            self.cancelled.add(request_id)
            self.lock.notify()

    def allow(self, request_id: int, position: int, mask: bytes) -> None:
        assert not mask or len(mask) == 4 * -(-self.model.vocab_size // 32)
        with self.lock:
            for state in self.running + self.waiting:
                if state.id == request_id:
                    assert state.request.guided and (state.mask, state.count) == (None, position)
                    state.mask = mask
            self.lock.notify()

    def metrics(self):
        with self.lock:
            return SimpleNamespace(
                waiting=len(self.waiting),
                running=len(self.running),
                total_blocks=self.config.cache_block_count,
                free_blocks=self.config.cache_block_count - len(self.running),
                steps=self.steps,
                prompt_tokens=sum(len(r.token_ids) for r in self.requests),
                generated_tokens=self.steps,
                preemptions=0,
                evictions=0,
                steps_in_flight=len(self.running),
                stalled_seconds=self.stalled_seconds,
                paused=self.paused,
                cached_blocks=0,
                cached_tokens=0,
                healthy=not self.closing,
            )

    def _control(self, paused, *call):
        with self.lock:
            self.paused = paused
            self.calls.append(call)
            self.lock.notify()

    def pause(self) -> None:
        self._control(True, "pause")

    def resume(self) -> None:
        self._control(False, "resume")

    def sleep(self, level) -> None:
        self._control(True, "sleep", level)

    def wake(self) -> None:
        self._control(False, "wake")

    def close(self) -> None:
        with self.lock:
            self.closing = True
            self.lock.notify()
        self.thread.join()

    def _loop(self) -> None:
        while True:
            with self.lock:
                while not self.closing and (self.paused or not (self.waiting or self.running)):
                    self.lock.wait()
                room = self.config.max_batch_size - len(self.running)
                self.running += self.waiting[:room]
                del self.waiting[:room]
                outputs = []
                for state in self.running + self.waiting:
                    if self.closing or state.id in self.cancelled:
                        outputs.append(_output(state, [], "cancelled"))
                    elif state in self.running:
                        outputs.append(self._advance(state))
                done = {output.id for output in outputs if output.finish_reason}
                self.running = [state for state in self.running if state.id not in done]
                self.waiting = [state for state in self.waiting if state.id not in done]
                self.cancelled -= done
                self.finished += [output.finish_reason for output in outputs if output.finish_reason]
                self.steps += 1
                closing = self.closing
            if outputs:
                self.on_outputs(outputs)
            if closing:
                return
            time.sleep(STEP_SECONDS)

    def _advance(self, state):
        request = state.request
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            return _output(state, [], "error", error=error)
        if request.return_logits:
            chunk = request.token_ids[state.count : state.count + self.config.max_prefill_token_num]
            state.count += len(chunk)
            logits = np.zeros((len(chunk), self.model.vocab_size), np.float32)
            logits[np.arange(len(chunk)), [next_token(t, 0, 0, 0) for t in chunk]] = 1
            return _output(
                state, [], "length" if state.count == len(request.token_ids) else "", logits=logits
            )
        token = next_token(state.last, state.count, request.temperature, request.seed)
        if getattr(request, "guided", False):
            mask, state.mask = state.mask, None
            if mask is None:
                return _output(state, [], "")
            vocab = self.model.vocab_size
            allowed = [t for t in range(vocab) if mask and mask[t // 8] >> t % 8 & 1]
            if not allowed:
                return _output(state, [], "stop")
            # The first that may come from there on.
            token = min(allowed, key=lambda t: (t - token) % vocab)
        if token in request.stop_token_ids:
            return _output(state, [], "stop")
        state.last, state.count = token, state.count + 1
        return _output(state, [token], "length" if state.count == request.max_new_tokens else "")


def _logprobs(token, count):
    """The token itself is the likeliest; then its successors, each less likely by 1."""
    return SimpleNamespace(logprob=-0.5, top=[(min(token + i, 255), -0.5 - i) for i in range(count)])


def _output(state, token_ids, finish_reason, error="", logits=None):
    return SimpleNamespace(
        id=state.id,
        token_ids=token_ids,
        finish_reason=finish_reason,
        error=error,
        logits=logits,
        cached_tokens=min(CACHED, len(state.request.token_ids) - 1),
        logprobs=[_logprobs(token, state.request.logprobs) for token in token_ids]
        if state.request.logprobs >= 0
        else [],
        prompt_logprobs=[
            _logprobs(token, state.request.prompt_logprobs) for token in state.request.token_ids[1:]
        ]
        if state.request.prompt_logprobs >= 0 and state.count <= 1
        else [],
    )
