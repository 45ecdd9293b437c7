"""The engines under test. A new engine joins by adding its name to ENGINES and a branch to `make_engine`."""

import pytest

ENGINES = ("turbomind",)


@pytest.fixture(params=ENGINES)
def make_engine(request, tiny_store):
    """Builds engines on a tiny random model with a byte tokenizer; closes them."""
    from turbomill.engine.config import EngineConfig
    from turbomill.engine.turbomind import TurbomindEngine

    pytest.importorskip("turbomill._core")
    classes = {"turbomind": TurbomindEngine}
    engines = []

    def make(**config):
        defaults = {"session_len": 256, "max_batch_size": 8, "num_threads": 2}
        engines.append(classes[request.param](tiny_store, EngineConfig(**(defaults | config))))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def engine(make_engine):
    return make_engine()
