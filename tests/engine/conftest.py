"""Engines for the tests: the real core on a tiny random model, and the double of fake_core.py."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from byte_tokenizer import byte_tokenizer
from hypothesis import HealthCheck, settings
from tiny_stores import other_tiny_store, tiny_checkpoint, tiny_store  # noqa: F401
from transformers import PreTrainedTokenizerFast

import turbomill

# Machines under load are slow; that is no failure.
settings.register_profile("turbomill", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("turbomill")


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


@pytest.fixture
def fake_core(monkeypatch):
    """Puts the double in the place of turbomill._core."""
    import fake_core as double

    monkeypatch.setitem(sys.modules, "turbomill._core", double)
    monkeypatch.setattr(turbomill, "_core", double, raising=False)
    monkeypatch.setattr("turbomill.engine.turbomind._blas_loaded", False)
    double.Engine.instances.clear()
    yield double
    monkeypatch.undo()


@pytest.fixture
def fake_store(tokenizer) -> SimpleNamespace:
    """What TurbomindEngine reads of a store."""
    tensor = SimpleNamespace(
        name="embed",
        layout="dense.nk",
        dtype="float16",
        shape=(257, 4),
        path=Path("x"),
        offset=0,
        nbytes=2056,
    )
    return SimpleNamespace(
        model={"vocab_size": 257},
        tensors={"embed": tensor},
        manifest={"dtype": "float16", "tokenizer": {"files": ["tokenizer.json"]}},
        tokenizer=lambda: tokenizer,
        context_length=512,
        eos_token_ids=(256,),
        bos_token_id=None,
    )


@pytest.fixture
def make_fake_engine(fake_core, fake_store):
    """Builds TurbomindEngines over the double; closes them."""
    from turbomill.engine.config import EngineConfig
    from turbomill.engine.turbomind import TurbomindEngine

    engines = []

    def make(**config):
        engines.append(TurbomindEngine(fake_store, EngineConfig(**config)))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def fake_engine(make_fake_engine):
    return make_fake_engine()
