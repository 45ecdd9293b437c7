"""The suite that every engine passes, on the GPU: in fp32, and with the cache in 8 bits."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_conformance import *  # noqa: F403

from turbomill.engine.config import EngineConfig
from turbomill.engine.turbomind import TurbomindEngine

SPEC = importlib.util.spec_from_file_location(
    "engine_fixtures", Path(__file__).parents[1] / "engine/conftest.py"
)
assert SPEC is not None and SPEC.loader is not None
fixtures = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(fixtures)
tiny_checkpoint, tiny_store = fixtures.tiny_checkpoint, fixtures.tiny_store


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
