"""Assembles the command line from the packages' own `cli.py`, loading each only when it is used.

`turbomill --help` imports neither torch nor any package below, which keeps it fast.
"""

from __future__ import annotations

import importlib
from typing import Any

import rich_click as click

from turbomill import __version__

# command -> (module, attribute, one-line help)
COMMANDS = {
    "lite": ("turbomill.quant.cli", "lite", "Calibrate and quantize a model: RTN, AWQ, GPTQ."),
    "convert": ("turbomill.convert.cli", "convert", "Convert a checkpoint to a fused model store."),
    "inspect": ("turbomill.convert.cli", "inspect", "Show what a checkpoint or a store holds."),
    "serve": ("turbomill.engine.cli", "serve", "Serve a model over an OpenAI-compatible API."),
    "chat": ("turbomill.engine.cli", "chat", "Talk to a model in the terminal."),
    "eval": ("turbomill.reports.cli", "evaluate", "Score a model: perplexity, KL divergence, KV cache."),
    "bench": ("turbomill.reports.cli", "bench", "Measure speed: the engine alone, or a server."),
    "report": ("turbomill.reports.cli", "report", "Render runs as one HTML page and Markdown."),
    "demo": ("turbomill.reports.cli", "demo", "Do the whole job on the built-in model."),
    "check_env": (
        "turbomill.reports.check_env",
        "check_env",
        "Say what was built and what this machine has.",
    ),
}


def normalize(token: str) -> str:
    """Dashes and underscores mean the same in command and option names."""
    return token.replace("_", "-")


class LazyGroup(click.RichGroup):
    """A group whose commands are imported when they are invoked."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The commands, in the order of a user's work."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command, or stand in for it while `--help` lists names."""
        by_name = {normalize(name): entry for name, entry in COMMANDS.items()}
        entry = by_name.get(normalize(cmd_name))
        if entry is None:
            return None
        module, attribute, _ = entry
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: Any) -> None:
        """List the commands from the table above, without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, _, text) in COMMANDS.items()])


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "token_normalize_func": normalize},
)
@click.version_option(__version__, prog_name="turbomill")
def cli() -> None:
    """Quantize language models, convert them to a fused store, serve them, and score the result.

    MODEL is a local directory, a GGUF file, a store, a hub name, or `demo` (SmolLM2-135M-Instruct).
    Every command takes --debug, which shows tracebacks.
    """
