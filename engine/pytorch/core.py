"""The core: one thread owns scheduler, sequences, pool and model; all else goes through a queue.

A turn: plan a step, run it, draw its tokens, tell the clients; then take in what has arrived.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import count
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import torch

from turbomill.engine.pytorch.blocks import BlockPool
from turbomill.engine.pytorch.device import failure, give_memory_back, is_lost
from turbomill.engine.pytorch.records import Request, Sequence
from turbomill.engine.pytorch.results import Results
from turbomill.engine.pytorch.rules import LogitRules
from turbomill.engine.pytorch.runner import Runner
from turbomill.engine.pytorch.scheduler import Scheduler
from turbomill.engine.requests import EngineMetrics

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger("turbomill.engine")


@dataclass(frozen=True)
class Settings:
    """What the core may use."""

    vocab_size: int
    blocks: int
    block_len: int
    prefix_caching: bool
    max_batch_size: int
    max_prefill_token_num: int
    num_threads: int  # 0: as PyTorch has it


class TorchCore:
    """Runs requests with `runner`; see turbomill.engine.core.Core. `load` gives the model's weights again."""

    def __init__(
        self,
        runner: Runner,
        settings: Settings,
        load: Callable[[], PreTrainedModel],
        on_outputs: Callable[[list[Any]], None],
    ) -> None:
        self._runner, self._settings, self._load, self._on_outputs = runner, settings, load, on_outputs
        runner.allocate()
        self._scheduler = self._new_scheduler()
        self._results = Results(self._scheduler, settings.vocab_size)
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._numbers = count(1)
        self._lock = threading.Lock()  # of the fields that clients read
        self._closing, self._broken = False, ""
        self._busy_since: float | None = None  # since the engine thread last gave a sign; None: it waits
        self._stepping = False
        self._paused = self._asleep = self._ended = False
        self._steps = self._prompt_tokens = 0
        self._healthy = True
        self._published = self._metrics()
        self._thread = threading.Thread(target=self._run, name="turbomill-pytorch", daemon=True)
        self._thread.start()

    def _new_scheduler(self) -> Scheduler:
        s = self._settings
        pool = BlockPool(s.blocks, s.block_len, s.prefix_caching)
        return Scheduler(pool, s.max_batch_size, s.max_prefill_token_num)

    # Any thread.

    def submit(self, request: Request) -> int:
        """Queue a request; its id. Raises ValueError for one that can never run, RuntimeError when closed."""
        vocab, pool = self._settings.vocab_size, self._scheduler.pool
        spelled = [token for word in request.bad_words for token in word]
        for name, ids in (("the prompt", request.token_ids), ("bad_words", spelled)):
            if any(not 0 <= token < vocab for token in ids):
                raise ValueError(f"{name}: token id {max(ids)} is outside the vocabulary of {vocab}")
        needed = pool.needed(len(request.token_ids) + request.max_new_tokens)
        if needed > pool.total:
            raise ValueError(f"the request needs {needed} KV blocks, the cache has {pool.total}")
        with self._lock:
            if self._closing or self._broken:
                raise RuntimeError(self._broken or "the engine is closed")
            number = next(self._numbers)
            self._inbox.put(lambda: self._accept(number, request))
        return number

    def cancel(self, request_id: int) -> None:
        """Ask for a request to end; its last output has finish_reason "cancelled"."""
        self._inbox.put(lambda: self._cancel(request_id))

    def allow(self, request_id: int, position: int, mask: bytes) -> None:
        """Say which tokens may follow the `position` generated ones; an empty mask ends the text."""
        self._inbox.put(lambda: self._allow(request_id, position, mask))

    def metrics(self) -> EngineMetrics:
        """A snapshot. How long the engine thread has given no sign is computed by whoever asks."""
        with self._lock:
            since, stepping, now = self._busy_since, self._stepping, self._published
        stalled = 0.0 if since is None else time.monotonic() - since
        return replace(now, stalled_seconds=stalled, steps_in_flight=int(stepping))

    def pause(self) -> None:
        """Plan no more steps; return when none is in flight."""
        self._command(lambda: self._set_paused(True))

    def resume(self) -> None:
        """Go on. Raises RuntimeError while asleep."""
        self._command(lambda: self._set_paused(False))

    def sleep(self, level: int) -> None:
        """Give the cache's memory back, and the weights' (2)."""
        self._command(lambda: self._sleep(level))

    def wake(self) -> None:
        """Take it again. Raises RuntimeError where that fails; may be tried again."""
        self._command(self._wake)

    def update(self, load: Callable[[], PreTrainedModel]) -> None:
        """Go on with the weights that `load` gives. Where it fails the engine is left asleep."""
        self._command(lambda: self._update(load))

    def close(self) -> None:
        """End every request as cancelled, join the thread, free everything. Idempotent."""
        with self._lock:
            first, self._closing = not self._closing, True
            if first:
                self._inbox.put(self._end)
        self._thread.join()
        self._runner.release()
        self._runner.model = None
        if not self._broken:
            give_memory_back(self._runner.device)

    def _command(self, action: Callable[[], None]) -> None:
        done: Future[None] = Future()

        def run() -> None:
            self._sign(None)  # not a step: loading weights may take long
            try:
                action()
                self._publish()  # before whoever waits looks
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(None)
            self._sign(time.monotonic())

        with self._lock:
            if self._closing:
                raise RuntimeError("the engine is closed")
            self._inbox.put(run)
        done.result()

    # The engine thread.

    def _run(self) -> None:
        if self._settings.num_threads:
            torch.set_num_threads(self._settings.num_threads)
        while not self._ended:
            try:
                worked = not self._paused and self._step()
                self._take_in(wait=not worked)
            except Exception as error:  # the device is lost, or a mistake: nobody is left waiting for ever
                self._break(error)
            self._publish()  # before the clients hear of it: who saw the last output sees its blocks free
            self._notify()

    def _take_in(self, wait: bool) -> None:
        """What has arrived, in order; with `wait`, at least one thing."""
        if wait:
            self._sign(None)
            event = self._inbox.get()
            self._sign(time.monotonic())
            event()
        while not self._ended:
            try:
                event = self._inbox.get_nowait()
            except Empty:
                return
            event()

    def _step(self) -> bool:
        """Plan and run one step; whether there was anything to run."""
        slices = self._scheduler.plan()
        if not slices:
            return False
        self._steps += 1
        self._publish()
        self._sign(time.monotonic(), stepping=True)
        try:
            self._results.take(slices, self._runner.run(slices))
        except Exception as error:
            if is_lost(error):
                raise
            logger.error("a step of the model failed", exc_info=error)
            self._healthy = False
            reason = f"the model failed: {failure(error)}"
            for piece in slices:
                if self._scheduler.find(piece.sequence.id) is not None:  # else it had ended before
                    self._results.fail(piece.sequence, reason)
        self._sign(time.monotonic())
        self._publish()
        self._notify()
        return True

    def _accept(self, number: int, request: Request) -> None:
        self._prompt_tokens += len(request.token_ids)
        device, rules = self._runner.device, None
        if LogitRules.wanted_by(request):
            rules = LogitRules(request, self._settings.vocab_size, device)
        self._scheduler.add(Sequence(number, request, rules))

    def _cancel(self, number: int) -> None:
        if (sequence := self._scheduler.find(number)) is not None:
            self._results.finish(sequence, "cancelled")

    def _allow(self, number: int, position: int, mask: bytes) -> None:
        sequence = self._scheduler.find(number)
        if sequence is None:
            return
        if not sequence.request.guided or sequence.rules is None or position != sequence.generated:
            self._results.fail(sequence, "a token mask that the request does not wait for")
        elif not any(mask):
            self._results.finish(sequence, "stop")
        else:
            sequence.rules.allow(mask, self._settings.vocab_size, self._runner.device)
            sequence.allowed_at = position

    def _set_paused(self, paused: bool) -> None:
        if self._asleep and not paused:
            raise RuntimeError("the engine is asleep: wake it up")
        self._paused = paused

    def _sleep(self, level: int) -> None:
        self._scheduler.drop_blocks()
        self._runner.release()
        if level == 2:
            self._runner.model = None
        give_memory_back(self._runner.device)
        self._paused = self._asleep = True

    def _wake(self) -> None:
        self._restore()
        self._paused = False

    def _restore(self) -> None:
        if self._asleep:
            if self._runner.model is None:
                self._runner.model = self._load()
            self._runner.allocate()
        self._asleep = False

    def _update(self, load: Callable[[], PreTrainedModel]) -> None:
        paused, asleep = self._paused, self._asleep
        self._load = load
        self._sleep(2)
        if not asleep:
            self._restore()
            self._paused = paused

    def _end(self) -> None:
        for sequence in self._scheduler.all():
            self._results.finish(sequence, "cancelled")
        self._ended = True

    def _break(self, error: Exception) -> None:
        logger.error("the pytorch engine failed", exc_info=error)
        self._healthy = False
        with self._lock:
            self._broken = f"the pytorch engine failed: {failure(error)}"
        left = self._scheduler.all()
        self._scheduler = self._new_scheduler()
        self._results.abandon(self._scheduler, left, self._broken)

    def _sign(self, moment: float | None, stepping: bool = False) -> None:
        with self._lock:
            self._busy_since, self._stepping = moment, stepping

    def _metrics(self) -> EngineMetrics:
        scheduler, pool = self._scheduler, self._scheduler.pool
        return EngineMetrics(
            waiting=len(scheduler.waiting),
            running=len(scheduler.running),
            total_blocks=pool.total,
            free_blocks=pool.free,
            cached_blocks=pool.cached,
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._results.cached_tokens,
            generated_tokens=self._results.generated_tokens,
            preemptions=scheduler.preemptions,
            evictions=pool.evictions,
            steps_in_flight=0,
            stalled_seconds=0.0,
            paused=self._paused,
            healthy=self._healthy,
        )

    def _publish(self) -> None:
        now = self._metrics()
        with self._lock:
            self._published = now

    def _notify(self) -> None:
        if outputs := self._results.outputs():
            try:
                self._on_outputs(outputs)
            except Exception as error:
                logger.error("outputs could not be delivered", exc_info=error)
