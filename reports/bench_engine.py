"""`turbomill bench engine`: prefill and decode speed of the engine alone, without a server."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

from turbomill import console
from turbomill.engine.base import AsyncEngine
from turbomill.engine.config import EngineConfig, GenerationConfig
from turbomill.engine.kv_scheme import KvScheme
from turbomill.errors import UsageError
from turbomill.reports.measured import open_measured
from turbomill.reports.runs import Run, Speed, check_run_dir, new_run, save_run


@dataclass(frozen=True)
class Load:
    """`batch` sequences together: random prompts, and a fixed number of tokens each."""

    batch: int
    prompt_tokens: int
    completion_tokens: int

    def __post_init__(self) -> None:
        for name, low in (("batch", 1), ("prompt_tokens", 1), ("completion_tokens", 2)):
            if getattr(self, name) < low:
                option = "concurrency" if name == "batch" else name.replace("_", "-")
                raise UsageError(f"--{option} {getattr(self, name)}: expected at least {low}")

    def prompts(self, vocab_size: int, seed: int) -> list[list[int]]:
        """Random token ids [batch][prompt_tokens]."""
        rng = random.Random(seed)
        return [[rng.randrange(vocab_size) for _ in range(self.prompt_tokens)] for _ in range(self.batch)]


async def _arrivals(engine: AsyncEngine, prompt: list[int], gen: GenerationConfig) -> list[float]:
    """When each token of one generation came."""
    times: list[float] = []
    async with aclosing(engine.generate(prompt, gen)) as outputs:
        async for output in outputs:
            times += [time.perf_counter()] * len(output.token_ids)
    return times


async def run_load(engine: AsyncEngine, load: Load, vocab_size: int, seed: int = 0) -> tuple[float, float]:
    """Prefill and decode tokens/s of one round.

    Prefill lasts until the last sequence has its first token; decode is every token after that moment.
    """
    gen = GenerationConfig(max_new_tokens=load.completion_tokens, ignore_eos=True)
    prompts = load.prompts(vocab_size, seed)
    start = time.perf_counter()
    arrivals = await asyncio.gather(*[_arrivals(engine, prompt, gen) for prompt in prompts])
    filled = max(times[0] for times in arrivals)
    end = max(times[-1] for times in arrivals)
    prefill = load.batch * load.prompt_tokens / (filled - start)
    later = sum(moment > filled for times in arrivals for moment in times)
    if not later:  # so fast that the first tokens and the last were delivered together
        later, filled = load.batch * load.completion_tokens, start
    return prefill, later / (end - filled)


async def run_mixed(engine: AsyncEngine, load: Load, vocab_size: int, seed: int = 0) -> tuple[float, float]:
    """Prefill and decode tokens/s while both go on, of one round.

    `batch` sequences decode; when the last of them has its first token, as many prompts more arrive. Until
    those all have their first token, counts what the one half generates and the other half reads.
    """
    decoding, arriving = load.prompts(vocab_size, seed), load.prompts(vocab_size, -1 - seed)
    long = GenerationConfig(max_new_tokens=load.completion_tokens, ignore_eos=True)
    one = GenerationConfig(max_new_tokens=1, ignore_eos=True)
    times: list[list[float]] = [[] for _ in decoding]
    begun = asyncio.Event()

    async def decode(prompt: list[int], mine: list[float]) -> None:
        async with aclosing(engine.generate(prompt, long)) as outputs:
            async for output in outputs:
                mine += [time.perf_counter()] * len(output.token_ids)
                if all(times):
                    begun.set()

    async with asyncio.TaskGroup() as group:
        for prompt, mine in zip(decoding, times, strict=True):
            group.create_task(decode(prompt, mine))
        await begun.wait()
        start = time.perf_counter()
        arrivals = await asyncio.gather(*[_arrivals(engine, prompt, one) for prompt in arriving])
        end = max(moments[-1] for moments in arrivals)
    generated = sum(start < moment <= end for mine in times for moment in mine)
    seconds = max(end - start, 1e-9)
    return load.batch * load.prompt_tokens / seconds, generated / seconds


def measure(
    engine: AsyncEngine,
    load: Load,
    vocab_size: int,
    *,
    rounds: int = 3,
    warmup: int = 1,
    seed: int = 0,
    mixed: bool = False,
) -> Speed:
    """Medians over `rounds`, after `warmup` rounds that do not count; with `mixed`, of mixed rounds too."""
    for number in range(warmup):
        asyncio.run(run_load(engine, load, vocab_size, seed - 1 - number))
    speeds = [asyncio.run(run_load(engine, load, vocab_size, seed + i)) for i in range(rounds)]
    both = [asyncio.run(run_mixed(engine, load, vocab_size, seed + i)) for i in range(rounds if mixed else 0)]
    return Speed(
        batch=load.batch,
        prompt_tokens=load.prompt_tokens,
        completion_tokens=load.completion_tokens,
        prefill_tok_s=statistics.median(prefill for prefill, _ in speeds),
        decode_tok_s=statistics.median(decode for _, decode in speeds),
        rounds=rounds,
        mixed_prefill_tok_s=statistics.median(prefill for prefill, _ in both) if both else None,
        mixed_decode_tok_s=statistics.median(decode for _, decode in both) if both else None,
    )


def bench_engine(
    model: str,
    loads: Sequence[Load],
    *,
    rounds: int = 3,
    warmup: int = 1,
    kv: KvScheme | None = None,
    num_threads: int = 0,
    seed: int = 0,
    mixed: bool = False,
    backend: str = EngineConfig.backend,
    work_dir: Path | None = None,
) -> Run:
    """Measure MODEL under every load. Everything that could fail is checked before the first."""
    for name, value, low in (("test-round", rounds, 1), ("warmup-round", warmup, 0)):
        if value < low:
            raise UsageError(f"--{name} {value}: expected at least {low}")
    kv = kv or KvScheme()
    if work_dir is not None:
        check_run_dir(work_dir)
    measured = open_measured(model, backend)
    longest = max(load.prompt_tokens + load.completion_tokens for load in loads)
    if measured.context_length is not None and longest > measured.context_length:
        raise UsageError(
            f"--prompt-tokens and --completion-tokens: {longest} together, but the model's context is "
            f"{measured.context_length} tokens"
        )
    config = EngineConfig(
        session_len=longest,
        max_batch_size=max(load.batch for load in loads) * (2 if mixed else 1),
        **kv.settings,
        num_threads=num_threads,
        backend=backend,
        enable_prefix_caching=False,  # rounds and loads begin alike, and every prompt is to be computed
    )
    speeds: list[Speed] = []
    with (
        measured.engine(config, reason="it is measured") as engine,
        console.progress("bench", len(loads)) as task,
    ):
        for load in loads:
            vocab = measured.card.vocab_size
            found = measure(engine, load, vocab, rounds=rounds, warmup=warmup, seed=seed, mixed=mixed)
            speeds.append(found)
            task.advance(note=f"batch {load.batch}")
    settings = {
        "rounds": rounds,
        "warmup": warmup,
        **kv.settings,
        "num_threads": num_threads,
        "seed": seed,
        "backend": backend,
    }
    run = new_run("bench_engine", settings, model=measured.card, engine=speeds)
    if work_dir is not None:
        save_run(run, work_dir)
    return run
