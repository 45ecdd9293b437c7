"""Runs the generations of one HTTP request and writes them as JSON or as a stream of events."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from turbomill.engine.base import AsyncEngine
from turbomill.engine.requests import GenerationOutput
from turbomill.engine.server.errors import ApiError, as_api_error
from turbomill.engine.server.metrics import ServerMetrics
from turbomill.engine.server.protocol import TextRequest
from turbomill.engine.server.shapes import ChoiceWriter
from turbomill.engine.server.streams import EventStream, Stream, event, merge, unless_disconnected


@dataclass(frozen=True)
class Context:
    """What every endpoint works with."""

    engine: AsyncEngine
    model_name: str
    metrics: ServerMetrics

    def token_text(self, token_ids: Sequence[int]) -> str:
        """Text of tokens that are shown one by one: special ones too."""
        return self.engine.decode(token_ids, skip_special_tokens=False)


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
    context: Context,
    http: Request,
    request: TextRequest,
    prompts: Sequence[list[int]],
    shape: type[ChoiceWriter],
    sources: Sequence[str | list[int]] = (),
) -> Response:
    """Generate `n` choices for each prompt of token ids. Everything is checked before the answer begins.

    `sources`: the prompts as they came, to be echoed.
    """
    samples = request.generation_config().samples()
    if request.wants_echo and request.top_count is not None:
        # Every choice begins with the prompt's log probabilities.
        samples = [replace(gen, prompt_logprobs=request.top_count) for gen in samples]
    streams: list[Stream] = []
    choices: list[ChoiceWriter] = []
    for number, token_ids in enumerate(prompts):
        echo = None
        if request.wants_echo:
            source = sources[number]
            echo = (token_ids, source if isinstance(source, str) else context.engine.decode(token_ids))
        for gen in samples:
            if gen.grammar is None:
                stream = context.engine.generate(token_ids, gen)
            else:  # compiling a grammar takes a while; the event loop goes on meanwhile
                stream = await asyncio.to_thread(context.engine.generate, token_ids, gen)
            streams.append(context.metrics.observe(stream))
            scored = request.top_count is not None
            choices.append(shape(len(choices), context.token_text, scored, echo))
    head = {
        "id": f"{shape.prefix}-{uuid.uuid4().hex}",
        "object": shape.chunk_object if request.stream else shape.object,
        "created": int(time.time()),
        "model": context.model_name,
    }
    if request.stream:
        return EventStream(_events(streams, request, choices, head))
    result = await unless_disconnected(http, _collect(streams, request, choices))
    return result if isinstance(result, Response) else JSONResponse({**head, **result})


async def _collect(
    streams: list[Stream], request: TextRequest, choices: list[ChoiceWriter]
) -> dict[str, Any]:
    tally = Tally(request.n)
    async with aclosing(merge(streams)) as outputs:
        async for index, output in outputs:
            _check_not_cancelled(output)
            choices[index].add(output)
            tally.add(index, output)
    return {"choices": [choice.whole() for choice in choices], "usage": tally.usage()}


async def _events(
    streams: list[Stream], request: TextRequest, choices: list[ChoiceWriter], head: dict[str, Any]
) -> AsyncGenerator[bytes, None]:
    tally = Tally(request.n)
    usage = {"usage": None} if request.include_usage else {}

    def chunk(choice: dict[str, Any]) -> bytes:
        return event({**head, "choices": [choice], **usage})

    try:
        for choice in choices:
            if opening := choice.opening():
                yield chunk(opening)
        async with aclosing(merge(streams)) as outputs:
            async for index, output in outputs:
                _check_not_cancelled(output)
                choices[index].add(output)
                tally.add(index, output)
                if choices[index].has_news:
                    yield chunk(choices[index].piece())
    except Exception as error:  # the status line is out: the error goes into the stream
        yield event(as_api_error(error).body())
        return
    if request.include_usage:
        yield event({**head, "choices": [], "usage": tally.usage()})
    yield event("[DONE]")


def _check_not_cancelled(output: GenerationOutput) -> None:
    if output.finish_reason == "cancelled":
        raise ApiError(503, "the server is shutting down")
