"""Sleeping gives the GPU's memory back, and changes no text."""

from __future__ import annotations

from typing import Any

import pytest
from native_engine import Native
from test_native_parity import prompt

from turbomill import _core


@pytest.mark.parametrize("level", [1, 2])
def test_what_ran_goes_on_after_sleep(store: Any, level: int) -> None:
    """Also the recorded steps, whose recordings hold the addresses of before."""
    with Native(store, device="cuda", cache_block_count=2**16) as engine:  # gigabytes of cache
        expected = engine.generate(prompt(60), 300)
        request = engine.submit(prompt(60), 300)
        while not engine.outputs.get(request):
            pass
        before = _core.cuda_devices()[0]["free_bytes"]
        engine.engine.sleep(level)
        assert _core.cuda_devices()[0]["free_bytes"] - before > 2**30  # other tests may share the GPU
        engine.engine.wake()
        assert engine.tokens(request) == expected
        assert engine.generate(prompt(60), 300) == expected
