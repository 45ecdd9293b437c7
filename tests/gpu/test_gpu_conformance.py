"""The suite that every engine passes, on the GPU: the C++ engine in fp32, and with its cache in 8 bits; the
PyTorch engine."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from turbomill.engine.config import EngineConfig
from turbomill.engine.select import create_engine

SUITE = Path(__file__).parents[1] / "engine/conformance/test_conformance.py"
ENGINES = {
    "turbomind": {},
    "turbomind-kv8": {"quant_policy": 8},
    "pytorch": {"backend": "pytorch"},
}


def _suite() -> ModuleType:
    """A copy: the tests of the module that pytest collects have the CPU's fixtures."""
    spec = importlib.util.spec_from_file_location("gpu_test_conformance", SUITE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


globals().update({name: test for name, test in vars(_suite()).items() if name.startswith("test_")})


@pytest.fixture(params=ENGINES)
def make_engine(request: pytest.FixtureRequest, tiny_store: Any) -> Iterator[Callable[..., Any]]:
    engines = []

    def make(**config: Any) -> Any:
        fields = {"device": "cuda", "session_len": 256, "max_batch_size": 8} | ENGINES[request.param]
        engines.append(create_engine(tiny_store, EngineConfig(**(fields | config))))
        assert engines[-1].info.backend == "cuda:0"
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def engine(make_engine: Callable[..., Any]) -> Any:
    return make_engine()
