"""`turbomill bench serve`: latency and throughput of a server under load, over HTTP."""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from turbomill import console
from turbomill.engine.config import EngineConfig
from turbomill.engine.kv_scheme import KvScheme
from turbomill.errors import TurbomillError, UsageError
from turbomill.reports.latency import RequestResult, summarize
from turbomill.reports.load_client import Load, LoadOptions, http_client, send, served_card
from turbomill.reports.load_shapes import LoadRequest, longest
from turbomill.reports.measured import open_measured
from turbomill.reports.runs import ModelCard, Run, check_run_dir, new_run, save_run
from turbomill.reports.server_process import server
from turbomill.reports.slo import Slo, find_knee
from turbomill.reports.traces import read_sharegpt


async def load_server(
    base_url: str,
    options: LoadOptions,
    *,
    model: str | None = None,
    api_key: str | None = None,
    slo: Slo | None = None,
    tokenize: Callable[[str], list[int]] | None = None,
) -> dict[str, Any]:
    """Put the load on a running server; returns fields named as `vllm bench serve` names them.

    With `tokenize`, which gives the token ids of a text, answers are counted again.
    """
    async with http_client(base_url, api_key) as client:
        name = model or (await served_card(client))["id"]
        # One request that does not count: it fails at once where the whole load would, and warms the server.
        first = options.conversations()[0][0]
        body = {"model": name, "prompt": first.prompt, "max_tokens": 1, "stream": True}
        probe = await send(client, body, first.prompt_tokens)
        if probe.error:
            raise TurbomillError(f"{base_url}: a first request failed, so no load was sent: {probe.error}")
        count = sum(len(talk) for talk in options.conversations())
        with console.progress("requests", count) as task:
            load = Load(client, name, options, task.advance, tokenize)
            results, duration = await load.run()
    rate = options.request_rate
    return {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "backend": "openai",
        "model_id": name,
        "num_prompts": len(results),
        **({} if options.trace else _random_lengths(options)),
        "request_rate": "inf" if math.isinf(rate) else rate,
        "burstiness": options.burstiness,
        "max_concurrency": options.max_concurrency,
        "server_stopped": load.stopped,
        **summarize(results, duration),
        **({} if slo is None else _goodput(results, duration, slo)),
    }


def _random_lengths(options: LoadOptions) -> dict[str, Any]:
    shape = options.shape
    return {
        "random_input_len": options.input_len,
        "random_output_len": options.output_len,
        "random_range_ratio": shape.range_ratio,
        "length_distribution": shape.distribution,
        "random_prefix_len": shape.prefix_len,
        "num_turns": shape.turns,
    }


class _StoppedError(Exception):
    """The server is gone: no use in further loads."""


def _tokenize(model: str, backend: str) -> Callable[[str], list[int]]:
    tokenizer = open_measured(model, backend).tokenizer()
    return lambda text: list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _goodput(results: Sequence[RequestResult], duration: float, slo: Slo) -> dict[str, Any]:
    """Requests/s that met the SLO, under vLLM's name, and their share of all that were sent."""
    good = sum(slo.met_by(result) for result in results)
    return {
        "goodput": slo.describe(),
        "request_goodput": good / duration,
        "slo_share": good / len(results),
    }


@dataclass(frozen=True)
class Knee:
    """How the knee is looked for."""

    share: float = 0.99  # of the requests that have to meet the SLO
    steps: int = 6  # loads after the first

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise UsageError(f"--slo-share {self.share}: expected a share above 0, at most 1")
        if self.steps < 1:
            raise UsageError(f"--knee-steps {self.steps}: expected at least 1")


@dataclass(frozen=True)
class TraceFile:
    """A file of conversations, whose first questions are sent."""

    path: Path
    output_len: int | None = None
    tokenizer: str | None = None  # of which model, where the server is not ours

    def read(self, model: str | None, options: LoadOptions, backend: str) -> tuple[LoadRequest, ...]:
        """The requests, counted with the model's own tokenizer."""
        measured = open_measured(self.tokenizer or str(model), backend)
        tokenizer = measured.tokenizer()
        count = options.num_prompts
        return tuple(
            read_sharegpt(
                self.path,
                lambda text: len(tokenizer(text, verbose=False)["input_ids"]),
                count,
                self.output_len,
                measured.context_length or sys.maxsize,
                options.seed,
            )
        )


def bench_serve(
    options: LoadOptions,
    *,
    model: str | None = None,
    base_url: str | None = None,
    served_name: str | None = None,
    api_key: str | None = None,
    kv: KvScheme | None = None,
    num_threads: int = 0,
    backend: str = EngineConfig.backend,
    work_dir: Path | None = None,
    slo: Slo | None = None,
    knee: Knee | None = None,
    trace: TraceFile | None = None,
    tokenizer: str | None = None,
) -> Run:
    """Load a running server, or a server of MODEL on `backend` that lives for the measurement.

    With `knee`, the load is repeated at the rates that the search for it takes. `tokenizer`: with
    `base_url`, the MODEL whose tokenizer counts the answers again, and continues conversations.

    Raises TurbomillError when every request failed, or when the server stopped midway, whose results up to
    then are in the run; fewer failures are counted in the result.
    """
    if (model is None) == (base_url is None):
        raise UsageError("give either MODEL, to start a server for it, or --base-url of a running server")
    if base_url is not None and backend != EngineConfig.backend:
        raise UsageError("--backend: is of a server that is started for MODEL; leave it out with --base-url")
    if knee is not None and slo is None:
        raise UsageError(
            "--find-knee: needs the objectives that a rate has to meet, such as --goodput ttft:500"
        )
    if trace is not None and model is None and trace.tokenizer is None:
        raise UsageError(
            "--dataset-path: lengths are counted in tokens: give --tokenizer MODEL with --base-url"
        )
    if options.shape.turns > 1 and (model is None and tokenizer is None):
        raise UsageError(
            "--num-turns: answers go into the next prompt: give --tokenizer MODEL with --base-url"
        )
    if options.shape.turns > 1 and trace is not None:
        raise UsageError("--num-turns: is of generated prompts; leave out --dataset-path")
    if work_dir is not None:
        check_run_dir(work_dir)
    if trace is not None:
        options = replace(options, trace=trace.read(model, options, backend))
    card: ModelCard | None = None
    named = tokenizer or (trace.tokenizer if trace is not None else None) or model
    tokenize = None if named is None else _tokenize(named, backend)
    with ExitStack() as stack:
        if model is not None:
            measured = open_measured(model, backend)
            card = measured.card
            room = longest(options.conversations())
            if measured.context_length is not None and room > measured.context_length:
                raise UsageError(
                    f"--random-input-len and --random-output-len: {room} together, but the model's "
                    f"context is {measured.context_length} tokens"
                )
            options = replace(options, vocab_size=card.vocab_size)
            arguments = ["--session-len", str(room), *(kv or KvScheme()).options]
            arguments += ["--num-threads", str(num_threads), "--backend", backend]
            served_name = Path(model).name or "model"
            base_url = stack.enter_context(server(card.path, served_name, arguments))
        assert base_url is not None
        url = base_url

        taken: list[dict[str, Any]] = []

        def measure(rate: float) -> dict[str, Any]:
            load = replace(options, request_rate=rate)
            sent = load_server(url, load, model=served_name, api_key=api_key, slo=slo, tokenize=tokenize)
            taken.append(asyncio.run(sent))
            if taken[-1]["server_stopped"]:
                raise _StoppedError
            return taken[-1]

        found: dict[str, Any] | None = None
        stopped = False
        try:
            if knee is None:
                loads = [measure(options.request_rate)]
            else:
                rate, loads = find_knee(measure, knee.share, knee.steps)
                found = {"request_rate": rate, "share": knee.share, "goodput": slo and slo.describe()}
        except _StoppedError:
            loads, stopped = taken, True
    settings = {"base_url": base_url, "seed": options.seed, "ignore_eos": options.ignore_eos}
    if model is not None:
        settings["backend"] = backend
    if trace is not None:
        settings["dataset_path"] = str(trace.path)
    run = new_run("bench_serve", settings, model=card, serve=loads, knee=found)
    result = loads[-1]
    if stopped:
        count = f"{result['completed']} of {result['num_prompts']}"
        error = f"{base_url}: the server stopped after {count} requests; the results are of those before"
        run = run.model_copy(update={"status": "failed", "error": error})
    elif not result["completed"]:
        error = f"{base_url}: all {result['failed']} requests failed, the first with: {result['errors'][0]}"
        run = run.model_copy(update={"status": "failed", "error": error})
    if work_dir is not None:
        save_run(run, work_dir)
    if run.error:
        raise TurbomillError(run.error)
    return run
