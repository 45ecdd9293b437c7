"""Several generations as one stream, server-sent events, and clients that go away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from turbomill.engine.requests import GenerationOutput

T = TypeVar("T")
Stream = AsyncGenerator[GenerationOutput, None]
CLIENT_CLOSED_REQUEST = 499  # nobody reads it; it is for the access log


async def merge(streams: Sequence[Stream]) -> AsyncGenerator[tuple[int, GenerationOutput], None]:
    """Outputs of all streams as they come, each with its stream's index. Closing it closes them all."""
    outputs: asyncio.Queue[tuple[int, GenerationOutput | BaseException | None]] = asyncio.Queue()

    async def pump(index: int, stream: Stream) -> None:
        try:
            async with aclosing(stream):
                async for output in stream:
                    outputs.put_nowait((index, output))
            outputs.put_nowait((index, None))
        except Exception as error:
            outputs.put_nowait((index, error))

    tasks = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    try:
        running = len(tasks)
        while running:
            index, output = await outputs.get()
            if output is None:
                running -= 1
            elif isinstance(output, BaseException):
                raise output
            else:
                yield index, output
    finally:
        await _end(tasks)


async def _end(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    """Return when the client has gone. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T | Response:
    """The result of `work`; when the client goes away first, `work` is cancelled."""
    task, watch = asyncio.create_task(work), asyncio.create_task(_disconnected(request.receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        return task.result()
    finally:
        await _end((task, watch))


def event(data: dict[str, Any] | str) -> bytes:
    """One server-sent event."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text}\n\n".encode()


class EventStream(Response):
    """Sends server-sent events; closes their source as soon as the client goes away."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        sender, watch = asyncio.create_task(self._send(send)), asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait((sender, watch), return_when=asyncio.FIRST_COMPLETED)
            if sender.done():
                with suppress(OSError):  # the client went away while we sent
                    sender.result()
        finally:
            await _end((sender, watch))
            await self._events.aclose()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for body in self._events:
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
