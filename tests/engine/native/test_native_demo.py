"""The built-in model through store and engine, against transformers in fp32 on the same weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from native_engine import Native

from turbomill.calib_data import load_windows
from turbomill.convert.checkpoint import open_checkpoint
from turbomill.convert.reference import load_dense_model
from turbomill.engine.stores import open_model

pytestmark = [pytest.mark.demo_model, pytest.mark.slow]

TOPICS = "rain glass bread rivers wool salt clock map bees ice wheel soap ink coal silk tea key dust sea sun"


@pytest.fixture(scope="module")
def demo() -> tuple[Any, Any, Any]:
    """(store, transformers model, tokenizer)"""
    checkpoint = open_checkpoint("demo")
    return open_model("demo"), load_dense_model(checkpoint).eval(), checkpoint.tokenizer()


def test_logits_over_512_tokens(demo: tuple[Any, Any, Any]) -> None:
    store, model, tokenizer = demo
    ids = load_windows("builtin", tokenizer, 1, 512, split="evaluation").ids[0].tolist()
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].numpy()
    for budget in (512, 100, 7):
        with Native(store, max_prefill_token_num=budget) as engine:
            assert np.abs(engine.logits(ids) - expected).max() < 2e-3


def test_greedy_text_of_twenty_prompts(demo: tuple[Any, Any, Any]) -> None:
    """Alone, seven at a time and sixty-four at a time, at two budgets, the text is transformers' own."""
    store, model, tokenizer = demo
    prompts = [tokenizer.encode(f"A short note about {topic}: it is") for topic in TOPICS.split()]
    assert len(prompts) == 20
    width = max(map(len, prompts))
    padded = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    with torch.no_grad():
        out = model.generate(
            padded, attention_mask=mask, max_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    expected = out[:, width:].tolist()

    def texts(streams: int, **config: Any) -> list[list[int]]:
        """Every prompt's tokens with `streams` requests submitted together, the prompts in turn."""
        with Native(store, cache_block_count=200, **config) as engine:
            got: list[list[int]] = []
            for start in range(0, max(len(prompts), streams), streams):
                batch = [prompts[i % len(prompts)] for i in range(start, start + streams)]
                got += [engine.tokens(request) for request in [engine.submit(p, 64) for p in batch]]
            return got

    for streams, budget in ((1, 512), (7, 512), (7, 16), (64, 512)):
        for i, tokens in enumerate(texts(streams, max_prefill_token_num=budget)):
            assert tokens == expected[i % len(prompts)], (streams, budget, i)
