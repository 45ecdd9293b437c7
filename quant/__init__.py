"""Post-training weight quantization: calibration statistics, RTN, AWQ and GPTQ."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from turbomill.quant.options import LayerRow, Method, QuantOptions, QuantResult
    from turbomill.quant.run import quantize

__all__ = ["LayerRow", "Method", "QuantOptions", "QuantResult", "quantize"]


def __getattr__(name: str) -> Any:
    """Load on first use: the command line's `--help` must not import torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    module = "turbomill.quant.run" if name == "quantize" else "turbomill.quant.options"
    return getattr(importlib.import_module(module), name)
