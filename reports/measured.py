"""MODEL as a benchmark opens it, for either engine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

from turbomill.engine.base import AsyncEngine
from turbomill.engine.stores import open_model
from turbomill.engine.turbomind import TurbomindEngine
from turbomill.reports.runs import ModelCard, model_card, source_card


@dataclass(frozen=True)
class Measured:
    """An opened MODEL, and how its engine is made."""

    card: ModelCard
    context_length: int | None  # None: nothing says
    tokenizer: Callable[[], Any]
    engine: Callable[..., AbstractContextManager[AsyncEngine]]


def open_measured(model: str, backend: str) -> Measured:
    """Open it as `backend` runs it: for turbomind that may mean to convert it first."""
    if backend == "pytorch":
        from turbomill.engine.pytorch.engine import PytorchEngine
        from turbomill.engine.pytorch.load import open_source

        source = open_source(model)
        card, tokenizer = source_card(model, source), source.checkpoint.tokenizer
        return Measured(card, source.context_length, tokenizer, partial(PytorchEngine, source))
    store = open_model(model)
    card = model_card(model, store)
    return Measured(card, store.context_length, store.tokenizer, partial(TurbomindEngine, store))
