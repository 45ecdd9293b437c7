"""Sends a load to an OpenAI-compatible server over HTTP and notes when each piece of text comes."""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

from turbomill.errors import TurbomillError, UsageError
from turbomill.reports.latency import RequestResult

CONNECT_S = 10.0  # to connect
READ_S = 600.0  # between two pieces
LOCAL = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class LoadRequest:
    """One request of a load."""

    prompt: str | list[int]
    prompt_tokens: int
    output_len: int


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

    def prompts(self) -> list[list[int]]:
        """Random token ids [num_prompts][input_len]."""
        rng = random.Random(self.seed)
        return [
            [rng.randrange(self.vocab_size) for _ in range(self.input_len)] for _ in range(self.num_prompts)
        ]

    def requests(self) -> list[LoadRequest]:
        """What is sent: the trace, or random prompts."""
        if self.trace:
            return list(self.trace[: self.num_prompts])
        return [LoadRequest(prompt, self.input_len, self.output_len) for prompt in self.prompts()]

    def send_times(self) -> list[float]:
        """Seconds after the start at which each request is due.

        Gaps are of a gamma distribution of mean 1 / rate, as in `vllm bench serve`: exponential at
        burstiness 1.
        """
        rng = random.Random(self.seed + 1)
        mean, now, times = 1 / self.request_rate, 0.0, []
        for _ in range(len(self.requests())):
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
    result = RequestResult(prompt_tokens, start=time.perf_counter())
    pieces = 0
    try:
        async with client.stream("POST", "v1/completions", json=body) as answer:
            if answer.is_error:
                text = (await answer.aread()).decode(errors="replace")
                result.error = f"HTTP {answer.status_code}: {text[:200]}"
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
    finally:
        result.end = time.perf_counter()
    result.output_tokens = result.output_tokens or pieces
    if not result.error and not result.arrivals:
        result.error = "no text came"
    return result


def _read_chunk(chunk: dict[str, Any], result: RequestResult) -> int:
    """Note one chunk's arrival, usage or error; 1 if it brought text."""
    if error := chunk.get("error"):
        result.error = str(error.get("message", error) if isinstance(error, dict) else error)
    if usage := chunk.get("usage"):
        result.output_tokens = int(usage.get("completion_tokens") or 0)
    choices = chunk.get("choices") or []
    if not choices:
        return 0
    # The last piece may be empty: tokens that are no text, such as an ignored end of text, took time too.
    if choices[0].get("text") or choices[0].get("finish_reason"):
        result.arrivals.append(time.perf_counter())
    return bool(choices[0].get("text"))


def _reason(error: Exception) -> str:
    text = str(error).strip().split("\n", 1)[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


async def run_load(
    client: httpx.AsyncClient, model: str, options: LoadOptions, done: Callable[[], object] = lambda: None
) -> tuple[Sequence[RequestResult], float]:
    """Send the whole load. Returns every request's result, in order, and the duration in seconds."""
    limit = asyncio.Semaphore(options.max_concurrency) if options.max_concurrency else nullcontext()
    base = {
        "model": model,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **({"ignore_eos": True} if options.ignore_eos else {}),
    }
    schedule = list(zip(options.requests(), options.send_times(), strict=True))
    start = time.perf_counter()

    async def one(request: LoadRequest, due: float) -> RequestResult:
        await asyncio.sleep(max(0.0, start + due - time.perf_counter()))
        async with limit:
            body = {**base, "prompt": request.prompt, "max_tokens": request.output_len}
            result = await send(client, body, request.prompt_tokens)
        done()
        return result

    results = await asyncio.gather(*[one(request, due) for request, due in schedule])
    return results, max(time.perf_counter() - start, 1e-9)
