"""Latency metrics of a load on a server, in the words of `vllm bench serve`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

PERCENTILES = (90, 95, 99)


@dataclass
class RequestResult:
    """What the client saw of one request. Times are seconds of one monotonic clock."""

    prompt_tokens: int
    start: float = 0.0
    end: float = 0.0
    arrivals: list[float] = field(default_factory=list)  # of each piece of text
    output_tokens: int = 0  # as the server says; else as its text is tokenized; else pieces
    error: str = ""
    text: str = ""
    pieces: int = 0  # of text; a piece may be several tokens
    usage_tokens: int = 0  # what the server says it generated
    text_tokens: int | None = None  # what its text is when it is tokenized again
    wanted: int | None = None  # tokens that were asked for
    rejected: bool = False  # turned away by the server, as too much
    lost: bool = False  # the connection broke, or there was none

    @property
    def ttft(self) -> float:
        """Time to first token."""
        return self.arrivals[0] - self.start

    @property
    def e2el(self) -> float:
        """End-to-end latency: until the last piece."""
        return self.arrivals[-1] - self.start

    @property
    def itls(self) -> list[float]:
        """Inter-token latencies: between pieces."""
        return [later - earlier for earlier, later in pairwise(self.arrivals)]

    @property
    def tpot(self) -> float | None:
        """Time per output token without the first; None for a single token."""
        return (self.e2el - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None


def _spread(name: str, seconds: Sequence[float]) -> dict[str, float | None]:
    """mean_, median_, std_ and p90_, p95_, p99_ of milliseconds; None without values."""
    values = np.asarray(seconds, dtype=np.float64) * 1000
    keys = [f"{kind}_{name}_ms" for kind in ("mean", "median", "std", *(f"p{p}" for p in PERCENTILES))]
    if not len(values):
        return dict.fromkeys(keys)
    figures = [values.mean(), np.median(values), values.std(), *np.percentile(values, PERCENTILES)]
    return {key: float(figure) for key, figure in zip(keys, figures, strict=True)}


def summarize(results: Sequence[RequestResult], duration: float) -> dict[str, Any]:
    """The metrics of a finished load. Failed requests count in `failed`, and in nothing else."""
    done = [result for result in results if not result.error]
    counted = [r.text_tokens for r in done if r.text_tokens is not None]
    prompt, output = sum(r.prompt_tokens for r in done), sum(r.output_tokens for r in done)
    return {
        "duration": duration,
        "completed": len(done),
        "failed": len(results) - len(done),
        "rejected": sum(r.rejected for r in results),
        "lengths_missed": sum(r.wanted is not None and r.output_tokens != r.wanted for r in done),
        "total_input_tokens": prompt,
        "total_output_tokens": output,
        "retokenized_output_tokens": None if not counted else sum(counted),
        "request_throughput": len(done) / duration,
        "output_throughput": output / duration,
        "total_token_throughput": (prompt + output) / duration,
        "max_concurrent_requests": _peak(done),
        **_spread("ttft", [r.ttft for r in done]),
        **_spread("tpot", [r.tpot for r in done if r.tpot is not None]),
        **_spread("itl", [itl for r in done for itl in r.itls]),
        **_spread("e2el", [r.e2el for r in done]),
        "errors": [r.error for r in results if r.error],
    }


def _peak(results: Sequence[RequestResult]) -> int:
    """The most requests that ran at one moment; one that ends as another begins does not overlap it."""
    edges = sorted([(r.start, 1) for r in results] + [(r.end, -1) for r in results])
    running = peak = 0
    for _, change in edges:
        running += change
        peak = max(peak, running)
    return peak
