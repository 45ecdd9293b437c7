"""Tests on a GPU: skipped, every one, where the core has no cuda backend or there is no GPU.

They need torch, numpy, transformers, safetensors, pytest and hypothesis; those that hold the GPU against the
CPU backend also need scipy_openblas64.
"""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path

import pytest

try:
    from turbomill import _core

    FOUND = "cuda" in _core.build_info()["backends"] and bool(_core.cuda_devices())
except ImportError:
    FOUND = False

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if FOUND:
        return
    skip = pytest.mark.skip(reason="needs a build with the cuda backend, and a GPU")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(skip)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs async tests: the machine with the GPU need not have pytest-asyncio."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True
