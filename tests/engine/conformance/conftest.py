"""The engines under test. A new engine joins by adding its name to ENGINES and a branch to `make_engine`."""

import pytest

ENGINES = ("turbomind", "pytorch")


@pytest.fixture(params=ENGINES)
def make_engine(request, tiny_store):
    """Builds engines on a tiny random model with a byte tokenizer; closes them."""
    from turbomill.engine.config import EngineConfig
    from turbomill.engine.pytorch.engine import PytorchEngine
    from turbomill.engine.turbomind import TurbomindEngine

    if request.param == "turbomind":
        pytest.importorskip("turbomill._core")
    classes = {"turbomind": TurbomindEngine, "pytorch": PytorchEngine}
    engines = []

    def make(**config):
        # PyTorch shares the threads of its process: its waiting for each other would slow a busy machine.
        threads = 1 if request.param == "pytorch" else 2
        defaults = {"session_len": 256, "max_batch_size": 8, "num_threads": threads}
        engines.append(classes[request.param](tiny_store, EngineConfig(**(defaults | config))))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def engine(make_engine):
    return make_engine()
