"""A few seconds of stress.py; CONTRIBUTING.md says how to run a minute of it under a sanitizer."""

from __future__ import annotations

from pathlib import Path

from native_engine import load_blas, store_of, tiny_llama
from stress import description, stress

from turbomill import _core


def test_many_clients_on_a_tiny_pool(tmp_path: Path) -> None:
    load_blas()
    tiny_llama(tmp_path / "model")
    counts = stress(_core, **description(store_of(tmp_path / "model")), seconds=4, clients=16)
    assert counts["done"] > 10 and counts["cancelled"] > 0
    assert min(counts[name] for name in ("sleeps", "preemptions", "evictions", "cached_tokens")) > 0
