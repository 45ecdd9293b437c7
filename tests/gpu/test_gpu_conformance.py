"""The suite that every engine passes, on the GPU: in fp32, and with the cache in 8 bits."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from turbomill.engine.config import EngineConfig
from turbomill.engine.turbomind import TurbomindEngine

ENGINE_TESTS = Path(__file__).parents[1] / "engine"
sys.path.append(str(ENGINE_TESTS))  # for what its conftest imports


def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"gpu_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


suite = _module(ENGINE_TESTS / "conformance/test_conformance.py")
fixtures = _module(ENGINE_TESTS / "conftest.py")
globals().update({name: test for name, test in vars(suite).items() if name.startswith("test_")})
tiny_checkpoint, tiny_store = fixtures.tiny_checkpoint, fixtures.tiny_store
other_tiny_store = fixtures.other_tiny_store


@pytest.fixture(params=[0, 8])
def make_engine(request: pytest.FixtureRequest, tiny_store: Any) -> Iterator[Callable[..., Any]]:
    engines = []

    def make(**config: Any) -> TurbomindEngine:
        fields = {"device": "cuda", "session_len": 256, "max_batch_size": 8, "quant_policy": request.param}
        engines.append(TurbomindEngine(tiny_store, EngineConfig(**(fields | config))))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def engine(make_engine: Callable[..., Any]) -> Any:
    return make_engine()
