"""Stores whose manifest was changed: the engine runs them or says why not, and the process stays alive."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from architectures import CASES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mutations import JSON_EDITS, bounded, mutated_json
from native_engine import Native, store_of
from quantized_models import quantized

from turbomill.convert.formats.awq import AwqFormat
from turbomill.convert.linear import QuantScheme
from turbomill.convert.store import open_store
from turbomill.errors import TurbomillError

NAMES = ["gemma3", "qwen2-moe", "phi3-long", "awq"]
WHERE = ["model", "tensors"]


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("stores")
    small = {"num_hidden_layers": 1, "vocab_size": 32, "pad_token_id": 0}
    found = {}
    for name in NAMES:
        path = root / name
        CASES["mistral-window" if name == "awq" else name].make(path, torch.float16, **small)
        if name == "awq":
            path = quantized(path, AwqFormat(QuantScheme(4, 32, False)), torch.float16)
        found[name] = store_of(path).path
    return found


@settings(
    max_examples=int(os.environ.get("TURBOMILL_FUZZ", "40")),
    deadline=None,
    database=None,
    derandomize="TURBOMILL_FUZZ" not in os.environ,
    suppress_health_check=list(HealthCheck),
)
@given(st.sampled_from(NAMES), st.sampled_from(WHERE), JSON_EDITS)
def test_manifests(
    stores: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, name: str, where: str, edits: list
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(stores[name], path)
    manifest = json.loads((path / "store.json").read_text())
    manifest[where] = mutated_json(manifest[where], edits)
    (path / "store.json").write_text(json.dumps(manifest))
    try:
        store = open_store(path)
    except TurbomillError:
        return
    with bounded():
        try:
            engine = Native(store, num_threads=1)
        except (ValueError, RuntimeError, TypeError) as error:  # what the core's errors are in Python
            assert str(error)
            return
        with engine:
            engine.wait(engine.submit(list(range(3, 20)), 2))
