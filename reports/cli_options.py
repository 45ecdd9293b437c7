"""Options that several commands of this package share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import rich_click as click

from turbomill.commands import options


class IntList(click.ParamType):
    """Integers separated by commas."""

    name = "n,n,..."

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, ...]:
        """Read "1,8" as (1, 8)."""
        if isinstance(value, tuple):
            return value
        try:
            return tuple(int(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is not integers separated by commas, such as 1,8", param, ctx)


class WindowCount(click.ParamType):
    """A number of windows, or None for "all"."""

    name = "n|all"

    def convert(self, value: Any, param: Any, ctx: Any) -> int | None:
        """Read "24" as 24."""
        try:
            return None if value == "all" else int(value)
        except ValueError:
            self.fail(f"{value!r} is neither a number of windows nor all", param, ctx)


OUTPUT = options(
    click.option(
        "--work-dir",
        type=click.Path(path_type=Path),
        help="Leave run.json in this directory, for `turbomill report`.",
    ),
    click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on stdout."),
)
TEXT = options(
    click.option(
        "--reference", help="Unquantized model for KL and top-1: a store, checkpoint, GGUF file or demo."
    ),
    click.option(
        "--dataset",
        default="builtin",
        show_default=True,
        help="Evaluation text: builtin, a .txt, .jsonl or .parquet file or folder, or a hub set's name.",
    ),
    click.option(
        "--windows",
        type=WindowCount(),
        default="24",
        show_default=True,
        help="Windows of text, evenly spread; all: one after the other, as papers do with 2048 tokens each.",
    ),
    click.option("--window-len", default=1024, show_default=True, help="Tokens per window."),
    click.option(
        "--stride",
        type=int,
        help="Windows from the text's beginning, so many tokens apart; each scores what is new.",
    ),
    click.option(
        "--force",
        is_flag=True,
        help="Also the calibration's own text, and a reference of another shape.",
    ),
)
THREADS = click.option("--num-threads", type=click.IntRange(0), default=0, help="CPU threads.  [every core]")
