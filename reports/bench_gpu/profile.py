"""Where an engine's time goes: every kernel of a workload by its share, and what lies between them.

    python -m turbomill.reports.bench_gpu.profile --engines w4:8,fp16:0 --workloads 16,prefill

Times are CUPTI's (by torch.profiler, which sees every kernel of the process, those of graphs too). Launches
that overlap run at once, so that kernels may add up to more than the time in which any of them ran.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from turbomill.reports.bench_gpu.end_to_end import Engine
from turbomill.reports.bench_gpu.random_model import model_named

NEW_TOKENS = 32  # of each stream: enough steps to see, few enough events to read


@dataclass(frozen=True)
class Kernel:
    """One kernel that ran: times in nanoseconds."""

    name: str
    start: int
    end: int


def busy_ns(kernels: Iterable[Kernel], begin: int = 0) -> int:
    """Time from `begin` on in which at least one of them ran."""
    total, end = 0, begin
    for kernel in sorted(kernels, key=lambda k: k.start):
        total += max(0, kernel.end - max(kernel.start, end))
        end = max(end, kernel.end)
    return total


def idle_us_per_step(kernels: list[Kernel]) -> float:
    """Microseconds of a decode step in which no kernel ran, from the first sampled tokens to the last."""
    samples = sorted(k.end for k in kernels if "choose_kernel" in k.name)
    if len(samples) < 2:
        return float("nan")
    between = [k for k in kernels if samples[0] < k.end <= samples[-1]]
    return (samples[-1] - samples[0] - busy_ns(between, samples[0])) / (len(samples) - 1) / 1e3


def short_name(name: str) -> str:
    """`void a::(anonymous namespace)::f<T, 8>(Args)` as `f<T, 8>`."""
    name = name.replace("(anonymous namespace)::", "").removeprefix("void ")
    name = re.sub(r"(\w+::)+", "", name)
    depth = 0
    for i, letter in enumerate(name):
        depth += (letter == "<") - (letter == ">")
        if letter == "(" and depth == 0:
            return name[:i]
    return name


def record(engine: Engine, lengths: list[tuple[int, int]]) -> tuple[float, list[Kernel]]:
    """Seconds that requests of (prompt, output) tokens took, and the kernels that ran meanwhile."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    engine.run(lengths)  # graphs, plans
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as recorded:
        seconds = engine.run(lengths)
        torch.cuda.synchronize()
    kernels = [
        Kernel(event.name, int(event.time_range.start * 1000), int(event.time_range.end * 1000))
        for event in recorded.events() or ()
        if event.device_type.name == "CUDA"
    ]
    return seconds, kernels


def table_of(title: str, seconds: float, kernels: list[Kernel]) -> Table:
    """Kernels by the time they took, the largest first."""
    times: dict[str, list[int]] = defaultdict(list)
    for kernel in kernels:
        times[short_name(kernel.name)].append(kernel.end - kernel.start)
    busy = busy_ns(kernels)
    table = Table(
        title=f"{title}: {seconds * 1e3:.1f} ms, some kernel ran in {busy / 1e6:.1f} ms; "
        f"none in {idle_us_per_step(kernels):.1f} us a step"
    )
    for column in ("kernel", "times", "us each", "ms", "%"):
        table.add_column(column, justify="left" if column == "kernel" else "right")
    for name, spans in sorted(times.items(), key=lambda item: -sum(item[1])):
        total = sum(spans) / 1e6
        each = total / len(spans) * 1e3
        table.add_row(name, str(len(spans)), f"{each:.1f}", f"{total:.2f}", f"{total / seconds / 10:.1f}")
    return table


def main() -> None:
    """Profile each engine on each workload."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", default="w4:8", help="w4, w8, fp16 or bf16:KV-BITS, by commas")
    parser.add_argument("--workloads", default="1,16,64,256,prefill", help="streams, or prefill, by commas")
    arguments = parser.parse_args()
    console = Console(width=160)
    for name in arguments.engines.split(","):
        weights, _, bits = name.partition(":")
        with tempfile.TemporaryDirectory() as folder:
            model = model_named(weights, Path(folder))
            engine = Engine(model, int(bits), "cuda:0")
            for workload in arguments.workloads.split(","):
                prompts = workload == "prefill"
                lengths = [(4096, 1)] * 8 if prompts else [(512, NEW_TOKENS)] * int(workload)
                seconds, kernels = record(engine, lengths)
                console.print(table_of(f"{name}, {workload}", seconds, kernels))
            engine.engine.close()


if __name__ == "__main__":
    main()
