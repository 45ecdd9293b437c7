"""`turbomill bench serve`: latency and throughput of a server under load, over HTTP."""

from __future__ import annotations

import asyncio
import math
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from turbomill import console
from turbomill.engine.stores import open_model
from turbomill.errors import TurbomillError, UsageError
from turbomill.reports.latency import summarize
from turbomill.reports.load_client import LoadOptions, http_client, run_load, send, served_model
from turbomill.reports.runs import ModelCard, Run, check_run_dir, model_card, new_run, save_run
from turbomill.reports.server_process import server


async def load_server(
    base_url: str, options: LoadOptions, *, model: str | None = None, api_key: str | None = None
) -> dict[str, Any]:
    """Put the load on a running server; returns fields named as `vllm bench serve` names them."""
    async with http_client(base_url, api_key) as client:
        name = model or await served_model(client)
        # One request that does not count: it fails at once where the whole load would, and warms the server.
        probe = await send(
            client,
            {"model": name, "prompt": options.prompts()[0], "max_tokens": 1, "stream": True},
            options.input_len,
        )
        if probe.error:
            raise TurbomillError(f"{base_url}: a first request failed, so no load was sent: {probe.error}")
        with console.progress("requests", options.num_prompts) as task:
            results, duration = await run_load(client, name, options, task.advance)
    rate = options.request_rate
    return {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "backend": "openai",
        "model_id": name,
        "num_prompts": options.num_prompts,
        "random_input_len": options.input_len,
        "random_output_len": options.output_len,
        "request_rate": "inf" if math.isinf(rate) else rate,
        "burstiness": 1.0,
        "max_concurrency": options.max_concurrency,
        **summarize(results, duration),
    }


def bench_serve(
    options: LoadOptions,
    *,
    model: str | None = None,
    base_url: str | None = None,
    served_name: str | None = None,
    api_key: str | None = None,
    quant_policy: int = 0,
    num_threads: int = 0,
    work_dir: Path | None = None,
) -> Run:
    """Load a running server, or a server of MODEL that lives for the measurement.

    Raises TurbomillError when every request failed; fewer failures are counted in the result.
    """
    if (model is None) == (base_url is None):
        raise UsageError("give either MODEL, to start a server for it, or --base-url of a running server")
    if work_dir is not None:
        check_run_dir(work_dir)
    card: ModelCard | None = None
    with ExitStack() as stack:
        if model is not None:
            store = open_model(model)
            card = model_card(model, store)
            longest = options.input_len + options.output_len
            if longest > store.context_length:
                raise UsageError(
                    f"--random-input-len and --random-output-len: {longest} together, but the model's "
                    f"context is {store.context_length} tokens"
                )
            options = replace(options, vocab_size=store.model["vocab_size"])
            arguments = ["--session-len", str(longest), "--quant-policy", str(quant_policy)]
            arguments += ["--num-threads", str(num_threads)]
            served_name = Path(model).name or "model"
            base_url = stack.enter_context(server(str(store.path), served_name, arguments))
        assert base_url is not None
        result = asyncio.run(load_server(base_url, options, model=served_name, api_key=api_key))
    settings = {"base_url": base_url, "seed": options.seed, "ignore_eos": options.ignore_eos}
    run = new_run("bench_serve", settings, model=card, serve=[result])
    if not result["completed"]:
        error = f"{base_url}: all {result['failed']} requests failed, the first with: {result['errors'][0]}"
        run = run.model_copy(update={"status": "failed", "error": error})
    if work_dir is not None:
        save_run(run, work_dir)
    if run.error:
        raise TurbomillError(run.error)
    return run
