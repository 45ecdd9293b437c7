"""Sends a load to an OpenAI-compatible server over HTTP and notes when each piece of text comes."""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

from turbomill.errors import TurbomillError, UsageError
from turbomill.reports.latency import RequestResult
from turbomill.reports.load_shapes import LoadRequest, Shape

CONNECT_S = 10.0  # to connect
READ_S = 600.0  # between two pieces
PROBE_S = 5.0  # to hear whether the server is still there
REJECTIONS = (413, 422, 429, 503)  # a server that is full, or will not take so much
LOCAL = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class LoadOptions:
    """What is sent, and when. `request_rate` inf sends everything at once, up to `max_concurrency`."""

    num_prompts: int = 32
    input_len: int = 128
    output_len: int = 64
    request_rate: float = math.inf  # requests/s: open loop
    burstiness: float = 1.0  # shape of the gaps' gamma distribution: 1 is a Poisson process, below 1 bursts
    max_concurrency: int | None = None  # requests at a time: closed loop
    ignore_eos: bool = True  # answers of exactly `output_len` tokens
    vocab_size: int = 1000  # prompts are random token ids below this
    seed: int = 0
    trace: tuple[LoadRequest, ...] = ()  # sent in place of random prompts
    shape: Shape = field(default_factory=Shape)  # of random prompts

    def __post_init__(self) -> None:
        for option, value, low in (
            ("--num-prompts", self.num_prompts, 1),
            ("--random-input-len", self.input_len, 1),
            ("--random-output-len", self.output_len, 1),
            ("--max-concurrency", self.max_concurrency or 1, 1),
            ("--vocab-size", self.vocab_size, 1),
        ):
            if value < low:
                raise UsageError(f"{option} {value}: expected at least {low}")
        if not self.request_rate > 0:
            raise UsageError(f"--request-rate {self.request_rate}: expected requests/s above 0, or inf")
        if not 0 < self.burstiness < math.inf:
            raise UsageError(f"--burstiness {self.burstiness}: expected a number above 0 (1: Poisson)")

    def conversations(self) -> list[list[LoadRequest]]:
        """What is sent: the trace, or random prompts; a list of turns each."""
        if self.trace:
            return [[request] for request in self.trace[: self.num_prompts]]
        return self.shape.conversations(
            self.num_prompts, self.input_len, self.output_len, self.vocab_size, self.seed
        )

    def send_times(self) -> list[float]:
        """Seconds after the start at which each conversation is due to begin.

        Gaps are of a gamma distribution of mean 1 / rate, as in `vllm bench serve`: exponential at
        burstiness 1.
        """
        rng = random.Random(self.seed + 1)
        mean, now, times = 1 / self.request_rate, 0.0, []
        for _ in range(len(self.trace[: self.num_prompts]) or self.num_prompts):
            times.append(now)
            now += rng.gammavariate(self.burstiness, mean / self.burstiness) if mean else 0.0
        return times


def http_client(base_url: str, api_key: str | None = None) -> httpx.AsyncClient:
    """A client whose connections do not limit the load. A local server is not asked through a proxy."""
    return httpx.AsyncClient(
        base_url=base_url.rstrip("/") + "/",
        headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
        timeout=httpx.Timeout(READ_S, connect=CONNECT_S),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        trust_env=urlsplit(base_url).hostname not in LOCAL,
    )


async def served_card(client: httpx.AsyncClient) -> dict[str, Any]:
    """What the server says of its first model. Raises TurbomillError when there is no such server."""
    try:
        answer = await client.get("v1/models")
        answer.raise_for_status()
        card = answer.json()["data"][0]
        return {**card, "id": str(card["id"])}
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
        raise TurbomillError(
            f"{client.base_url}: no OpenAI-compatible server answers there ({_reason(error)}); "
            "start one with `turbomill serve api_server MODEL`, or give another --base-url"
        ) from error


async def send(client: httpx.AsyncClient, body: dict[str, Any], prompt_tokens: int) -> RequestResult:
    """Stream one completion. A failure is noted in the result, never raised."""
    result = RequestResult(prompt_tokens, start=time.perf_counter(), wanted=body.get("max_tokens"))
    pieces = 0
    try:
        async with client.stream("POST", "v1/completions", json=body) as answer:
            if answer.is_error:
                text = (await answer.aread()).decode(errors="replace")
                result.error = f"HTTP {answer.status_code}: {text[:200]}"
                result.rejected = answer.status_code in REJECTIONS
                return result
            ended = False
            async for line in answer.aiter_lines():
                if not line.startswith("data:"):
                    continue
                data = line.removeprefix("data:").strip()
                if data == "[DONE]":
                    ended = True
                    break
                pieces += _read_chunk(json.loads(data), result)
            if not result.error and not ended:
                result.error = "the stream ended early"
    except (httpx.HTTPError, ValueError) as error:
        result.error = _reason(error)
        result.lost = isinstance(error, httpx.TransportError)
    finally:
        result.end = time.perf_counter()
    result.pieces = pieces
    result.output_tokens = result.usage_tokens or pieces
    if not result.error and not result.arrivals:
        result.error = "no text came"
    return result


def _read_chunk(chunk: dict[str, Any], result: RequestResult) -> int:
    """Note one chunk's arrival, usage or error; 1 if it brought text."""
    if error := chunk.get("error"):
        result.error = str(error.get("message", error) if isinstance(error, dict) else error)
    if usage := chunk.get("usage"):
        result.usage_tokens = int(usage.get("completion_tokens") or 0)
    choices = chunk.get("choices") or []
    if not choices:
        return 0
    # The last piece may be empty: tokens that are no text, such as an ignored end of text, took time too.
    if choices[0].get("text") or choices[0].get("finish_reason"):
        result.arrivals.append(time.perf_counter())
        result.text += choices[0].get("text") or ""
    return bool(choices[0].get("text"))


def _reason(error: Exception) -> str:
    text = str(error).strip().split("\n", 1)[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class Load:
    """Sends a whole load. `tokenize` gives token ids of a text; without it there are no later turns."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        model: str,
        options: LoadOptions,
        done: Callable[[], object] = lambda: None,
        tokenize: Callable[[str], list[int]] | None = None,
    ) -> None:
        self.stopped = False  # the server was there, and then it was not
        self._client, self._options, self._done, self._tokenize = client, options, done, tokenize
        limit = options.max_concurrency
        self._limit = asyncio.Semaphore(limit) if limit else nullcontext()
        # Special tokens are text too, or they would be missing where the text is counted again.
        exact = {"ignore_eos": True, "skip_special_tokens": False} if options.ignore_eos else {}
        self._base = {
            "model": model,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **exact,
        }

    async def run(self) -> tuple[list[RequestResult], float]:
        """Every request's result, in order, and the duration in seconds."""
        schedule = list(zip(self._options.conversations(), self._options.send_times(), strict=True))
        start = time.perf_counter()
        talks = await asyncio.gather(*[self._talk(talk, start + due) for talk, due in schedule])
        return [result for talk in talks for result in talk], max(time.perf_counter() - start, 1e-9)

    async def _talk(self, turns: Sequence[LoadRequest], due: float) -> list[RequestResult]:
        """One conversation: each turn when the answer to the one before is there."""
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        results: list[RequestResult] = []
        said: list[int] = []
        for turn in turns:
            if results and results[-1].error:
                results.append(RequestResult(turn.prompt_tokens, error="not sent: the turn before failed"))
                continue
            prompt = [*said, *turn.prompt] if said else turn.prompt
            results.append(await self._one(prompt, len(said) + turn.prompt_tokens, turn.output_len))
            if len(turns) > 1:
                assert self._tokenize is not None
                # Odd bytes come back as more tokens than they were: the room is for what was asked for.
                answer = self._tokenize(results[-1].text)[: turn.output_len]
                said = [*prompt, *answer]  # type: ignore[list-item]
        return results

    async def _one(self, prompt: str | list[int], prompt_tokens: int, output_len: int) -> RequestResult:
        async with self._limit:
            if self.stopped:
                result = RequestResult(prompt_tokens, error="not sent: the server had stopped")
            else:
                body = {**self._base, "prompt": prompt, "max_tokens": output_len}
                result = await send(self._client, body, prompt_tokens)
        if result.lost and not self.stopped:
            self.stopped = not await self._is_there()
        if self._tokenize is not None and not result.error:
            result.text_tokens = len(self._tokenize(result.text))
            result.output_tokens = result.usage_tokens or result.text_tokens or result.pieces
        self._done()
        return result

    async def _is_there(self) -> bool:
        try:
            await self._client.get("v1/models", timeout=PROBE_S)
        except httpx.HTTPError:
            return False
        return True
