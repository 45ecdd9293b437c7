"""What /metrics shows: requests, tokens, latencies, and the engine's queues and KV blocks."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from turbomill.engine.base import AsyncEngine
from turbomill.engine.requests import GenerationOutput

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
SECONDS_PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)


class EngineCollector(Collector):
    """Reads the engine when /metrics is asked for."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """Gauges and counters of the scheduler and the KV pool."""
        now = self._engine.metrics()
        used = now.total_blocks - now.free_blocks - now.cached_blocks
        yield GaugeMetricFamily("turbomill_requests_running", "Requests in the batch.", now.running)
        yield GaugeMetricFamily("turbomill_requests_waiting", "Requests waiting for admission.", now.waiting)
        blocks = GaugeMetricFamily("turbomill_cache_blocks", "KV blocks by state.", labels=["state"])
        blocks.add_metric(["used"], used)
        blocks.add_metric(["free"], now.free_blocks)
        blocks.add_metric(["cached"], now.cached_blocks)
        yield blocks
        yield GaugeMetricFamily(
            "turbomill_cache_usage_ratio", "Used share of the KV blocks.", used / max(now.total_blocks, 1)
        )
        yield CounterMetricFamily("turbomill_engine_steps", "Forward passes.", now.steps)
        yield CounterMetricFamily(
            "turbomill_preemptions", "Sequences that lost their KV blocks.", now.preemptions
        )
        yield CounterMetricFamily(
            "turbomill_prefix_cache_queries_tokens", "Prompt tokens that were looked up.", now.prompt_tokens
        )
        yield CounterMetricFamily(
            "turbomill_prefix_cache_hits_tokens", "Prompt tokens that were not computed.", now.cached_tokens
        )
        yield CounterMetricFamily(
            "turbomill_prefix_cache_evictions", "Cached KV blocks given up for others.", now.evictions
        )
        yield GaugeMetricFamily(
            "turbomill_engine_stalled_seconds",
            "Time since the step in flight gave a sign; a busy engine stays below a step's length.",
            now.stalled_seconds,
        )
        yield GaugeMetricFamily("turbomill_engine_paused", "1 while paused or asleep.", float(now.paused))
        yield GaugeMetricFamily("turbomill_engine_healthy", "1 while the engine runs.", float(now.healthy))


class ServerMetrics:
    """Counts what goes through the server. Each app has its own registry."""

    def __init__(self, engine: AsyncEngine, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(engine))

        def counter(name: str, text: str, *more: str) -> Counter:
            return Counter(name, text, ["model_name", *more], registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, ["model_name"], buckets=buckets, registry=self.registry)

        self._model = model_name
        self._requests = counter("turbomill_requests", "Finished generations by reason.", "finish_reason")
        self._prompt_tokens = counter("turbomill_prompt_tokens", "Prompt tokens.")
        self._generated_tokens = counter("turbomill_generated_tokens", "Generated tokens.")
        self._first = histogram(
            "turbomill_time_to_first_token_seconds", "From request to first token.", SECONDS
        )
        self._each = histogram(
            "turbomill_time_per_output_token_seconds",
            "Mean time of a token after the first.",
            SECONDS_PER_TOKEN,
        )
        self._whole = histogram(
            "turbomill_e2e_request_latency_seconds", "From request to last token.", SECONDS
        )

    async def observe(
        self, stream: AsyncGenerator[GenerationOutput, None]
    ) -> AsyncGenerator[GenerationOutput, None]:
        """Pass a generation through and count it, however it ends."""
        start = time.perf_counter()
        first = last = 0.0
        usage, reason, first_tokens = None, "cancelled", 0
        try:
            async with aclosing(stream):
                async for output in stream:
                    last = time.perf_counter()
                    usage = output.usage
                    if not first and output.token_ids:
                        first, first_tokens = last, len(output.token_ids)
                        self._first.labels(self._model).observe(first - start)
                    reason = output.finish_reason or reason
                    yield output
        except Exception:
            reason = "error"
            raise
        finally:
            self._requests.labels(self._model, reason).inc()
            if usage is not None:
                self._prompt_tokens.labels(self._model).inc(usage.prompt_tokens)
                self._generated_tokens.labels(self._model).inc(usage.generated_tokens)
                if (later := usage.generated_tokens - first_tokens) > 0:
                    self._each.labels(self._model).observe((last - first) / later)
            if reason in ("stop", "length"):
                self._whole.labels(self._model).observe(last - start)
