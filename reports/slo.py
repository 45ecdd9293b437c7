"""Service-level objectives, and the knee: the highest request rate that still meets them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from turbomill.errors import UsageError
from turbomill.reports.latency import RequestResult

METRICS = ("ttft", "tpot", "e2el")


@dataclass(frozen=True)
class Slo:
    """Upper limits in milliseconds; None: no limit."""

    ttft: float | None = None
    tpot: float | None = None
    e2el: float | None = None

    @classmethod
    def parse(cls, texts: Sequence[str]) -> Slo | None:
        """Of "ttft:200", "tpot:50", ..., as `vllm bench serve --goodput` takes them; None of nothing."""
        limits: dict[str, float] = {}
        for text in texts:
            name, _, value = text.partition(":")
            try:
                limit = float(value)
            except ValueError:
                limit = math.nan
            if name not in METRICS or not 0 < limit < math.inf:
                raise UsageError(
                    f"--goodput {text}: expected {', '.join(METRICS)} with milliseconds above 0, as ttft:200"
                )
            limits[name] = limit
        return cls(**limits) if limits else None

    def met_by(self, result: RequestResult) -> bool:
        """Whether a request kept every limit. One that failed did not; of a single token there is no TPOT."""
        if result.error:
            return False
        seconds = {"ttft": result.ttft, "tpot": result.tpot, "e2el": result.e2el}
        return all(
            (limit := getattr(self, name)) is None
            or (value := seconds[name]) is None
            or 1000 * value <= limit
            for name in METRICS
        )

    def describe(self) -> dict[str, float]:
        """The limits there are."""
        return {name: limit for name in METRICS if (limit := getattr(self, name)) is not None}


def find_knee(
    measure: Callable[[float], dict[str, Any]], share: float, steps: int
) -> tuple[float | None, list[dict[str, Any]]]:
    """The highest rate at which at least `share` of the requests meet the SLO, and every load, by rate.

    `measure` puts a load on the server at a rate (requests/s) and returns its fields, `slo_share` among them.
    First everything is sent at once: the server answers no more requests/s than then, so the knee lies
    below, and is looked for by bisection. None when even the lowest rate that was tried misses the SLO.
    """
    flood = measure(math.inf)
    loads = [flood]
    top = float(flood["request_throughput"])
    if flood["slo_share"] >= share:
        return top, loads
    low, high = 0.0, top
    for _ in range(steps):
        rate = (low + high) / 2
        load = measure(rate)
        loads.append(load)
        if load["slo_share"] >= share:
            low = rate
        else:
            high = rate
    loads[1:] = sorted(loads[1:], key=lambda load: float(load["request_rate"]))
    return low or None, [*loads[1:], flood]
