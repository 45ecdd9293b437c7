"""Carries outputs from an engine's core, on its thread, to the event loops that wait for them."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from turbomill.engine.core import Core, Output
from turbomill.engine.requests import EngineError, PromptError

if TYPE_CHECKING:
    from turbomill.engine.guide import Guide

logger = logging.getLogger("turbomill.engine")


class OutputStream:
    """One request's outputs, received on the event loop that submitted it. Leaving it cancels the request."""

    def __init__(self, bridge: Bridge, request_id: int, loop: asyncio.AbstractEventLoop) -> None:
        self._bridge = bridge
        self.request_id = request_id
        self.loop = loop
        self.queue: asyncio.Queue[Output | None] = asyncio.Queue()
        self.guide: Guide | None = None  # says what may follow each token
        self.failure = "the engine was closed while a request was waiting"  # when a None has come

    async def next(self) -> list[Output]:
        """Wait for outputs; return all that came, in order. Raises EngineError if the engine is closed."""
        outputs = [await self.queue.get()]
        while not self.queue.empty():
            outputs.append(self.queue.get_nowait())
        received = [output for output in outputs if output is not None]
        if len(received) < len(outputs):
            raise EngineError(self.failure)
        return received

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bridge.leave(self.request_id)


class Bridge:
    """Knows who waits for which request. `on_outputs` is the core's callback."""

    def __init__(self, run: Callable[[Callable[[], None]], None]) -> None:
        """`run` has work of the guides done on another thread."""
        self._run = run
        self._lock = threading.Lock()
        self._streams: dict[int, OutputStream] = {}  # those whose last output has not come
        self._engine: Core | None = None

    def attach(self, engine: Core) -> None:
        """Begin to submit to `engine`."""
        self._engine = engine

    def submit(self, request: Any, start: tuple[Guide, bytes] | None = None) -> OutputStream:
        """Queue a request for the running event loop. `start`: its guide, and what may come first."""
        loop = asyncio.get_running_loop()
        # Held over the submission, so that the first output finds the stream.
        with self._lock:
            if self._engine is None:
                raise EngineError("the engine is closed")
            try:
                request_id = self._engine.submit(request)
            except ValueError as error:
                raise PromptError(str(error)) from error
            except RuntimeError as error:
                raise EngineError(str(error)) from error
            stream = self._streams[request_id] = OutputStream(self, request_id, loop)
            if start is not None:
                stream.guide = start[0]
                self._engine.allow(request_id, 0, start[1])
        return stream

    def leave(self, request_id: int) -> None:
        """The consumer is gone: cancel the request if it still runs, and drop what still comes."""
        with self._lock:
            unfinished = self._streams.pop(request_id, None) is not None
            engine = self._engine
        if unfinished and engine is not None:
            engine.cancel(request_id)

    def _follow(self, stream: OutputStream, guide: Guide, token_ids: list[int]) -> None:
        """Tell the engine what may come after these tokens. It waits, so whatever goes wrong is reported."""
        try:
            mask = guide.follow(token_ids)
        except Exception as error:
            stream.failure = str(error) if isinstance(error, EngineError) else f"the guide failed: {error!r}"
            self.leave(stream.request_id)
            if not stream.loop.is_closed():
                stream.loop.call_soon_threadsafe(stream.queue.put_nowait, None)
            return
        with self._lock:
            engine = self._engine
        if engine is not None:
            engine.allow(stream.request_id, guide.position, mask)

    def control(self, action: str, *arguments: object) -> None:
        """Have the engine pause, resume, sleep, wake or update, and wait for it. Raises EngineError."""
        with self._lock:
            engine = self._engine
        if engine is None:
            raise EngineError("the engine is closed")
        try:
            getattr(engine, action)(*arguments)
        except RuntimeError as error:
            raise EngineError(str(error)) from error

    def on_outputs(self, outputs: list[Output]) -> None:
        """Deliver one step's outputs, with one wake-up per event loop."""
        batches: dict[asyncio.AbstractEventLoop, list[tuple[OutputStream, Output]]] = defaultdict(list)
        with self._lock:
            for output in outputs:
                stream = self._streams.get(output.id)
                if stream is None:  # its consumer left
                    continue
                if output.finish_reason:
                    del self._streams[output.id]
                elif stream.guide is not None and output.token_ids:
                    self._run(partial(self._follow, stream, stream.guide, output.token_ids))
                batches[stream.loop].append((stream, output))
        for loop, batch in batches.items():
            try:
                loop.call_soon_threadsafe(_deliver, batch)
            except RuntimeError:  # the loop was closed without leaving its requests
                logger.warning(
                    "an event loop was closed with %d requests running; they are cancelled", len(batch)
                )
                for stream, _ in batch:
                    self.leave(stream.request_id)

    def close(self) -> None:
        """Close the engine; whoever still waits is told."""
        with self._lock:
            engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()
        with self._lock:
            left, self._streams = list(self._streams.values()), {}
        for stream in left:
            if not stream.loop.is_closed():
                stream.loop.call_soon_threadsafe(stream.queue.put_nowait, None)


def _deliver(batch: list[tuple[OutputStream, Output]]) -> None:
    for stream, output in batch:
        stream.queue.put_nowait(output)
