"""`turbomill serve` and `turbomill chat`."""

from __future__ import annotations

import rich_click as click

from turbomill.engine.config import EngineConfig
from turbomill.engine.options import engine_options

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


@click.group()
def serve() -> None:
    """Serve a model."""


@serve.command()
@click.argument("model")
@click.option(
    "--server-name", default="127.0.0.1", show_default=True, help="Address; 0.0.0.0 for every interface."
)
@click.option(
    "--server-port", type=click.IntRange(0, 65535), default=23333, show_default=True, help="0: a free one."
)
@click.option("--model-name", help="Name in the API.  [MODEL's last part]")
@click.option(
    "--api-keys", multiple=True, help="Accept only these bearer tokens (repeat, or separate by commas)."
)
@click.option(
    "--log-level", type=click.Choice(LOG_LEVELS, case_sensitive=False), default="INFO", show_default=True
)
@click.option(
    "--hang-timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=120.0,
    show_default=True,
    help="Seconds of one step after which /health calls the engine hung.",
)
@engine_options
def api_server(
    model: str,
    server_name: str,
    server_port: int,
    model_name: str | None,
    api_keys: tuple[str, ...],
    log_level: str,
    hang_timeout: float,
    config: EngineConfig,
) -> None:
    """Serve MODEL over an OpenAI-compatible HTTP API until interrupted."""
    from turbomill.console import setup_logging
    from turbomill.engine.server.run import run_server

    setup_logging(log_level.upper())
    keys = [key for text in api_keys for key in text.split(",") if key]
    run_server(
        model,
        config,
        server_name=server_name,
        server_port=server_port,
        model_name=model_name,
        api_keys=keys,
        log_level=log_level,
        hang_timeout=hang_timeout,
    )


@click.command()
@click.argument("model")
@click.option("--system", "system_prompt", help="System message.")
@click.option("--max-new-tokens", type=int, help="Length limit of an answer.  [what is left of the session]")
@click.option("--temperature", type=float, default=0.8, show_default=True, help="0 is greedy.")
@click.option("--top-k", type=int, default=50, show_default=True, help="0: off.")
@click.option("--top-p", type=float, default=0.95, show_default=True, help="1: off.")
@click.option("--seed", type=int, help="The same seed gives the same answers.")
@engine_options
def chat(
    model: str,
    system_prompt: str | None,
    max_new_tokens: int | None,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int | None,
    config: EngineConfig,
) -> None:
    """Talk to MODEL: one line is one message; `exit` or Ctrl-D ends, Ctrl-C stops an answer."""
    import sys

    from turbomill.console import setup_logging
    from turbomill.engine.chat import Conversation, talk
    from turbomill.engine.config import GenerationConfig
    from turbomill.engine.select import create_engine

    # A person at a terminal wants the answers, not the log.
    setup_logging("WARNING" if sys.stdin.isatty() else "INFO")
    gen = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=True,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
    )
    engine = create_engine(model, config)
    try:
        talk(Conversation(engine, gen, system_prompt))
    finally:
        engine.close()
