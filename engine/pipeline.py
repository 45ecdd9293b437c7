"""`pipeline(MODEL)(prompts)`: generation without asyncio, for scripts and notebooks."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeVar, cast, overload

from turbomill.engine.base import AsyncEngine
from turbomill.engine.config import EngineConfig, GenerationConfig
from turbomill.engine.requests import (
    EngineError,
    FinishReason,
    GenerationOutput,
    Messages,
    Prompt,
    TokenLogprob,
)
from turbomill.engine.select import create_engine

if TYPE_CHECKING:
    from turbomill.convert.store import Store

T = TypeVar("T")


@dataclass(frozen=True)
class Response:
    """One generated text. In `stream_infer`, one piece of it."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    input_token_len: int
    generate_token_len: int
    index: int = 0  # of the prompt in the batch
    sample: int = 0  # which of the prompt's `n` texts
    logprobs: tuple[TokenLogprob, ...] = ()  # one for each of token_ids, with gen_config.logprobs
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # from the second token on; with the first sample
    cached_token_len: int = 0  # of the prompt, that the prefix cache had
    others: tuple[Response, ...] = ()  # the other n - 1 texts of the prompt


@dataclass(frozen=True)
class Text:
    """A text being generated: sample `sample` of prompt `index`."""

    index: int
    sample: int
    stream: AsyncGenerator[GenerationOutput, None]


class Pipeline:
    """Runs prompts on an engine that it owns, from ordinary code. A context manager; else `close()` it."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="turbomill-pipeline", daemon=True)
        self._thread.start()
        self._closed = False

    @overload
    def __call__(
        self,
        prompts: str | Messages | list[int],
        gen_config: GenerationConfig | None = None,
        *,
        do_preprocess: bool = True,
    ) -> Response: ...

    @overload
    def __call__(
        self,
        prompts: list[str] | list[Messages] | list[list[int]],
        gen_config: GenerationConfig | Sequence[GenerationConfig] | None = None,
        *,
        do_preprocess: bool = True,
    ) -> list[Response]: ...

    def __call__(
        self,
        prompts: str | list[str] | list[int] | list[list[int]] | Messages | list[Messages],
        gen_config: GenerationConfig | Sequence[GenerationConfig] | None = None,
        *,
        do_preprocess: bool = True,
    ) -> Response | list[Response]:
        """Generate for one prompt, or for many together.

        A text goes through the chat template as one user message, unless `do_preprocess` is False. Messages
        always do, token ids never. Every prompt is checked before the first one runs (raises PromptError).
        With `n` > 1 a prompt's response is that of its first text, and holds the `others`.
        """
        batch, single = _as_batch(prompts)
        streams = self._streams(batch, gen_config, do_preprocess)
        responses = self._run(_gather(streams))
        return responses[0] if single else responses

    def stream_infer(
        self,
        prompts: str | list[str] | list[int] | list[list[int]] | Messages | list[Messages],
        gen_config: GenerationConfig | Sequence[GenerationConfig] | None = None,
        *,
        do_preprocess: bool = True,
    ) -> Iterator[Response]:
        """Yield pieces as they are generated; `index` and `sample` say of which text.

        Leaving the loop cancels the rest.
        """
        streams = self._streams(_as_batch(prompts)[0], gen_config, do_preprocess)
        return self._iterate(streams)

    def _iterate(self, streams: list[Text]) -> Iterator[Response]:
        pieces: queue.SimpleQueue[Response | None] = queue.SimpleQueue()

        async def pump(text: Text) -> None:
            async with aclosing(text.stream) as outputs:
                async for output in outputs:
                    pieces.put(_response(text, [output]))

        async def pump_all() -> None:
            try:
                await _together([pump(text) for text in streams])
            finally:
                pieces.put(None)

        future = asyncio.run_coroutine_threadsafe(pump_all(), self._loop)
        try:
            while (piece := pieces.get()) is not None:
                yield piece
            future.result()
        finally:
            future.cancel()

    def _streams(
        self,
        batch: list[Prompt],
        gen_config: GenerationConfig | Sequence[GenerationConfig] | None,
        do_preprocess: bool,
    ) -> list[Text]:
        if self._closed:
            raise EngineError("the pipeline is closed")
        if gen_config is None or isinstance(gen_config, GenerationConfig):
            configs: Sequence[GenerationConfig | None] = [gen_config] * len(batch)
        else:
            configs = gen_config
        prompts = [
            cast(Prompt, [{"role": "user", "content": prompt}])
            if do_preprocess and isinstance(prompt, str)
            else prompt
            for prompt in batch
        ]
        return [
            Text(index, sample, self.engine.generate(prompt, one))
            for index, (prompt, gen) in enumerate(zip(prompts, configs, strict=True))
            for sample, one in enumerate((gen or GenerationConfig()).samples())
        ]

    def _run(self, work: Coroutine[object, object, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:  # also Ctrl-C: nothing keeps running behind the caller's back
            future.cancel()
            raise

    def close(self) -> None:
        """Close the engine and end the event loop. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self.engine.close()
        self._run(_finish_others())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def pipeline(model: str | Path | Store, engine_config: EngineConfig | None = None) -> Pipeline:
    """Load MODEL (a store, a checkpoint, a GGUF file, a hub name, `demo`) to run prompts on it."""
    return Pipeline(create_engine(model, engine_config))


def _as_batch(prompts: object) -> tuple[list[Prompt], bool]:
    """The prompts as a list, and whether it was a single one."""
    if isinstance(prompts, str):
        return [prompts], True
    items = list(cast(Sequence[object], prompts))
    if items and isinstance(items[0], dict | int):  # one conversation, or one prompt's token ids
        return [cast(Prompt, items)], True
    return cast(list[Prompt], items), False


def _response(text: Text, outputs: Sequence[GenerationOutput]) -> Response:
    last = outputs[-1]
    return Response(
        text="".join([output.text for output in outputs]),
        token_ids=tuple(token for output in outputs for token in output.token_ids),
        finish_reason=last.finish_reason,
        input_token_len=last.usage.prompt_tokens,
        generate_token_len=last.usage.generated_tokens,
        index=text.index,
        sample=text.sample,
        logprobs=tuple(logprob for output in outputs for logprob in output.logprobs),
        prompt_logprobs=tuple(logprob for output in outputs for logprob in output.prompt_logprobs),
        cached_token_len=last.usage.cached_tokens,
    )


async def _collect(text: Text) -> Response:
    async with aclosing(text.stream) as outputs:
        return _response(text, [output async for output in outputs])


async def _gather(streams: list[Text]) -> list[Response]:
    samples: dict[int, list[Response]] = {}
    for response in await _together([_collect(text) for text in streams]):
        samples.setdefault(response.index, []).append(response)
    return [replace(first, others=tuple(others)) for first, *others in samples.values()]


async def _together(work: Sequence[Coroutine[object, object, T]]) -> list[T]:
    """Run all; when one fails, cancel the others and raise its error alone."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _finish_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
