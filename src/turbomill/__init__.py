"""Turbomill: quantize language models, convert them to a fused store, serve them, and score the result.

The package is light to import: heavy libraries load with the sub-package that needs them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["EngineConfig", "GenerationConfig", "__version__", "pipeline"]

if TYPE_CHECKING:
    from turbomill.engine.config import EngineConfig, GenerationConfig
    from turbomill.engine.pipeline import pipeline

_EXPORTS = {
    "pipeline": "turbomill.engine.pipeline",
    "EngineConfig": "turbomill.engine.config",
    "GenerationConfig": "turbomill.engine.config",
}


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'turbomill' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_EXPORTS[name]), name)
