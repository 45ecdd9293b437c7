"""Runs the generations of one HTTP request and writes them as JSON or as a stream of events."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from turbomill.engine.base import AsyncEngine
from turbomill.engine.requests import GenerationOutput
from turbomill.engine.server.errors import ApiError, as_api_error
from turbomill.engine.server.metrics import ServerMetrics
from turbomill.engine.server.protocol import TextRequest
from turbomill.engine.server.streams import EventStream, Stream, event, merge, unless_disconnected


class Shape(Protocol):
    """How one endpoint writes its choices."""

    prefix: str  # of the answer's id
    object: str
    chunk_object: str

    def opening(self, index: int) -> dict[str, Any] | None:
        """The choice of the first chunk, before any text."""
        ...

    def piece(self, index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
        """The choice of a chunk."""
        ...

    def whole(self, index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
        """The choice of an answer that is not streamed."""
        ...


@dataclass(frozen=True)
class Context:
    """What every endpoint works with."""

    engine: AsyncEngine
    model_name: str
    metrics: ServerMetrics


@dataclass
class Tally:
    """Usage of one HTTP request: each prompt counts once, however many samples it has."""

    samples: int
    latest: dict[int, GenerationOutput] = field(default_factory=dict)

    def add(self, index: int, output: GenerationOutput) -> None:
        """Note the newest output of a choice."""
        self.latest[index] = output

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object."""
        prompt = sum(o.usage.prompt_tokens for index, o in self.latest.items() if index % self.samples == 0)
        cached = sum(o.usage.cached_tokens for index, o in self.latest.items() if index % self.samples == 0)
        generated = sum(o.usage.generated_tokens for o in self.latest.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


async def answer(
    context: Context, http: Request, request: TextRequest, prompts: Sequence[list[int]], shape: Shape
) -> Response:
    """Generate `n` choices for each prompt of token ids. Everything is checked before the answer begins."""
    gen = request.generation_config()
    streams: list[Stream] = []
    for token_ids in prompts:
        for sample in range(request.n):
            seeded = gen if gen.seed is None else gen.with_seed(gen.seed + sample)
            streams.append(context.metrics.observe(context.engine.generate(token_ids, seeded)))
    head = {
        "id": f"{shape.prefix}-{uuid.uuid4().hex}",
        "object": shape.chunk_object if request.stream else shape.object,
        "created": int(time.time()),
        "model": context.model_name,
    }
    if request.stream:
        return EventStream(_events(streams, request, shape, head))
    result = await unless_disconnected(http, _collect(streams, request, shape))
    return result if isinstance(result, Response) else JSONResponse({**head, **result})


async def _collect(streams: list[Stream], request: TextRequest, shape: Shape) -> dict[str, Any]:
    tally = Tally(request.n)
    texts = [""] * len(streams)
    async with aclosing(merge(streams)) as outputs:
        async for index, output in outputs:
            _check_not_cancelled(output)
            texts[index] += output.text
            tally.add(index, output)
    choices = [shape.whole(i, text, tally.latest[i].finish_reason) for i, text in enumerate(texts)]
    return {"choices": choices, "usage": tally.usage()}


async def _events(
    streams: list[Stream], request: TextRequest, shape: Shape, head: dict[str, Any]
) -> AsyncGenerator[bytes, None]:
    tally = Tally(request.n)
    usage = {"usage": None} if request.include_usage else {}

    def chunk(choice: dict[str, Any]) -> bytes:
        return event({**head, "choices": [choice], **usage})

    try:
        for index in range(len(streams)):
            if opening := shape.opening(index):
                yield chunk(opening)
        async with aclosing(merge(streams)) as outputs:
            async for index, output in outputs:
                _check_not_cancelled(output)
                tally.add(index, output)
                if output.text or output.finish_reason:
                    yield chunk(shape.piece(index, output.text, output.finish_reason))
    except Exception as error:  # the status line is out: the error goes into the stream
        yield event(as_api_error(error).body())
        return
    if request.include_usage:
        yield event({**head, "choices": [], "usage": tally.usage()})
    yield event("[DONE]")


def _check_not_cancelled(output: GenerationOutput) -> None:
    if output.finish_reason == "cancelled":
        raise ApiError(503, "the server is shutting down")
