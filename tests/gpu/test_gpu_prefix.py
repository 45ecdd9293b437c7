"""The prefix cache on the GPU: copied and shared blocks give the text that computing them gives."""

from __future__ import annotations

from typing import Any

import pytest
from native_engine import Native
from test_native_parity import prompt

SCHEMES = [
    {"quant_policy": 0},
    {"quant_policy": 8},
    {"quant_policy": 4},
    {"quant_policy": 4, "kv_rotation": True, "kv_16bit_layers": [1]},
    {"quant_policy": 84, "kv_rotation": True},
    {"quant_policy": 16},
]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("blocks", [9, 64])
def test_same_text_with_and_without(scheme: dict[str, Any], blocks: int, store: Any) -> None:
    """Beginnings of all lengths in common, together and again, with eviction and preemption."""
    stem = prompt(200)
    prompts = [stem[: 20 + 23 * (i % 8)] + prompt(4, seed=i % 3) for i in range(16)]
    texts = []
    for config in ({"enable_prefix_caching": False, "cache_block_count": 256}, {"cache_block_count": blocks}):
        with Native(store, device="cuda", max_prefill_token_num=90, **scheme, **config) as engine:
            for _ in range(2):
                requests = [engine.submit(p, 60) for p in prompts]
                texts.append([engine.tokens(r) for r in requests])
            found = engine.engine.metrics().cached_tokens
            assert (found > 0) == ("enable_prefix_caching" not in config)
    assert texts[0] == texts[1] == texts[2] == texts[3]


def test_equal_prompts_sent_together_are_computed_once(store: Any) -> None:
    with Native(store, device="cuda", max_prefill_token_num=64) as engine:
        requests = [engine.submit(prompt(180), 8, temperature=1.0, seed=s) for s in range(5)]
        found = [engine.wait(r)[-1].cached_tokens for r in requests]
        assert found == [0] + [179] * 4
