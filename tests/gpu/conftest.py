"""Tests on a GPU: skipped, every one, where the core has no cuda backend or there is no GPU.

They need torch, numpy, transformers, safetensors, pytest and hypothesis; those that hold the GPU against the
CPU backend also need scipy_openblas64, grammars llguidance, the server fastapi and uvicorn: skipped without.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import zlib
from pathlib import Path
from typing import Any

import pytest
from tiny_stores import other_tiny_store, tiny_checkpoint, tiny_store  # noqa: F401
from torch_threads import one_thread  # noqa: F401

try:
    from turbomill import _core

    FOUND = "cuda" in _core.build_info()["backends"] and bool(_core.cuda_devices())
except ImportError:
    FOUND = False

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Of a tiny random Llama in fp32."""
    from native_engine import store_of, tiny_llama  # they need the core

    path: Path = tmp_path_factory.mktemp("llama") / "model"
    tiny_llama(path)
    return store_of(path)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # TURBOMILL_SHARD=2/8: the second of eight processes, each of which runs tests of its own.
    if shard := os.environ.get("TURBOMILL_SHARD"):
        index, count = map(int, shard.split("/"))
        others = [item for item in items if zlib.crc32(item.nodeid.encode()) % count != index - 1]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in set(others)]
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
