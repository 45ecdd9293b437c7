"""Chooses the engine, and says which and why."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from turbomill.engine.base import AsyncEngine
from turbomill.engine.config import EngineConfig

if TYPE_CHECKING:
    from turbomill.convert.store import Store


def create_engine(model: str | Path | Store, config: EngineConfig | None = None) -> AsyncEngine:
    """The engine for MODEL under `config.backend`. The choice and its reason are logged and in `info`."""
    config = config or EngineConfig()
    default = config.backend == EngineConfig.backend
    reason = "the default backend" if default else f"backend {config.backend} was asked for"
    if config.backend == "pytorch":
        from turbomill.engine.pytorch.engine import PytorchEngine

        return PytorchEngine(model, config, reason=reason)
    from turbomill.engine.turbomind import TurbomindEngine

    return TurbomindEngine(model, config, reason=reason)
