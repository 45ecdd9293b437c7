"""The live table of a sweep: every variant's steps, and its figures as they come."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from rich.live import Live
from rich.table import Table
from rich.text import Text

from turbomill import console

logger = logging.getLogger("turbomill.reports")

State = Literal["", "running", "made", "unchanged", "failed"]
COLOURS = {"running": "yellow", "made": "green", "unchanged": "dim", "failed": "red"}


@dataclass
class SweepTable:
    """States and figures; on a terminal they are shown while they change, elsewhere they are logged."""

    variants: Sequence[str]
    steps: Sequence[str]
    states: dict[tuple[str, str], State] = field(default_factory=dict)
    figures: dict[str, tuple[str, ...]] = field(default_factory=dict)  # perplexity, KL, MB, tokens/s
    _live: Live | None = None

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Keep the table on a terminal for as long as the block runs."""
        if not console.stderr.is_terminal:
            yield
            return
        with Live(self.render(), console=console.stderr, auto_refresh=False) as live:
            self._live = live
            try:
                yield
            finally:
                self._live = None

    @contextmanager
    def step(self, variant: str, step: str) -> Iterator[None]:
        """Mark a step as running, then as made; as failed when it raises."""
        self.set(variant, step, "running")
        start = time.monotonic()
        try:
            yield
        except BaseException:
            self.set(variant, step, "failed")
            raise
        self.set(variant, step, "made")
        if self._live is None:
            logger.info("%s: %s done in %.0f s", variant, step, time.monotonic() - start)

    def set(self, variant: str, step: str, state: State) -> None:
        """Note a step's state."""
        self.states[variant, step] = state
        self._show()

    def tell(self, variant: str, figures: tuple[str, ...]) -> None:
        """Note a variant's figures."""
        self.figures[variant] = figures
        self._show()

    def _show(self) -> None:
        if self._live is not None:
            self._live.update(self.render(), refresh=True)

    def render(self) -> Table:
        """As it is now."""
        table = Table(title="Sweep", title_justify="left", header_style="bold")
        table.add_column("variant", overflow="fold")
        for name in self.steps:
            table.add_column(name)
        for name in ("perplexity", "KL", "MB", "tok/s"):
            table.add_column(name, justify="right")
        for variant in self.variants:
            states = [self.states.get((variant, step), "") for step in self.steps]
            cells = [Text(state or "–", COLOURS.get(state, "dim")) for state in states]
            table.add_row(Text(variant), *cells, *self.figures.get(variant, ("–",) * 4))
        return table
