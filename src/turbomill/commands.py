"""What every package's commands share. Imports click and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import rich_click as click


def normalize(token: str) -> str:
    """Dashes and underscores mean the same in command and option names."""
    return token.replace("_", "-")


class DashGroup(click.RichGroup):
    """A group that finds `auto_awq` as `auto-awq` too."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Look a command up whatever its dashes."""
        return {normalize(name): command for name, command in self.commands.items()}.get(normalize(cmd_name))


# For groups and commands that tests also invoke on their own; below the main group it is inherited.
SETTINGS = {"help_option_names": ["-h", "--help"], "token_normalize_func": normalize}


def options(*decorators: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Several decorators as one, applied top down, so that a set of options is written once."""

    def apply(function: Any) -> Any:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return apply
