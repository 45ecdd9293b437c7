"""Assembles the command line from the packages' own `cli.py`, loading each only when it is used.

Those modules import torch and the like inside their commands, which keeps `turbomill --help` fast.
"""

from __future__ import annotations

import importlib

import rich_click as click

from turbomill import __version__
from turbomill.commands import SETTINGS, normalize

# command -> (module, attribute). These modules import click and little else.
COMMANDS = {
    "lite": ("turbomill.quant.cli", "lite"),
    "convert": ("turbomill.convert.cli", "convert"),
    "inspect": ("turbomill.convert.cli", "inspect"),
    "diff": ("turbomill.convert.cli", "diff"),
    "verify": ("turbomill.reports.cli", "verify"),
    "serve": ("turbomill.engine.cli", "serve"),
    "chat": ("turbomill.engine.cli", "chat"),
    "eval": ("turbomill.reports.cli_eval", "evaluate"),
    "plan": ("turbomill.reports.cli", "plan"),
    "bench": ("turbomill.reports.cli_bench", "bench"),
    "sweep": ("turbomill.reports.cli", "sweep"),
    "report": ("turbomill.reports.cli", "report"),
    "runs": ("turbomill.reports.cli", "list_runs"),
    "demo": ("turbomill.reports.cli", "demo"),
    "check_env": ("turbomill.reports.check_env", "check_env"),
}


class LazyGroup(click.RichGroup):
    """A group whose commands are imported when they are invoked."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The commands, in the order of a user's work."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the module that owns a command."""
        by_name = {normalize(name): entry for name, entry in COMMANDS.items()}
        entry = by_name.get(normalize(cmd_name))
        if entry is None:
            return None
        module, attribute = entry
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command


@click.group(cls=LazyGroup, context_settings=SETTINGS)
@click.version_option(__version__, prog_name="turbomill")
def cli() -> None:
    """Quantize language models, convert them to a fused store, serve them, and score the result.

    MODEL is a local directory, a GGUF file, a store, a hub name, or `demo` (SmolLM2-135M-Instruct).
    Every command takes --debug, which shows tracebacks.
    """
