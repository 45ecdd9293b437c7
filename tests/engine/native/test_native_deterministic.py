"""`deterministic`: a sequence's logits have the same bits, whatever runs beside it and however it is cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from native_engine import Native, store_of, tiny_llama
from quantized_models import quantized
from test_native_scheduling import prompt

from turbomill import _core
from turbomill.convert.formats.awq import AwqFormat
from turbomill.convert.linear import QuantScheme

IDS = prompt(90, seed=1)


@pytest.fixture(scope="module", params=["dense", "packed"])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path: Path = tmp_path_factory.mktemp("deterministic") / "model"
    dtype = torch.float16
    tiny_llama(path, dtype, hidden_size=128, intermediate_size=256, num_attention_heads=8)
    if request.param == "packed":
        return store_of(quantized(path, AwqFormat(QuantScheme(4, 64, False)), dtype))
    return store_of(path)


def logits_in(store: Any, beside: int, **config: Any) -> np.ndarray:
    """Logits of IDS while `beside` other sequences run."""
    with Native(store, **config) as engine:
        others = [engine.submit(prompt(20 + 7 * i, seed=10 + i), 200) for i in range(beside)]
        found = engine.logits(IDS)
        for other in others:
            engine.engine.cancel(other)
        return found


BITS = (32, 16, 8) if _core.cpu_features()["int8"] else (32,)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("quant_policy", [0, 8])
def test_bits_do_not_depend_on_the_batch(store: Any, bits: int, quant_policy: int) -> None:
    config = {"deterministic": True, "activation_bits": bits, "quant_policy": quant_policy}
    alone = logits_in(store, 0, **config)
    for beside, budget in ((0, 7), (3, 64), (11, 33)):
        found = logits_in(store, beside, max_prefill_token_num=budget, **config)
        np.testing.assert_array_equal(found, alone)


def test_text_does_not_depend_on_the_batch(store: Any) -> None:
    """Sampled at a temperature where a last bit would show, with and without blocks kept from before."""
    fields = {"temperature": 1.5, "top_k": 0, "seed": 3, "logprobs": 1}
    found = []
    for beside, caching in ((0, False), (9, False), (5, True)):
        with Native(store, deterministic=True, enable_prefix_caching=caching) as engine:
            for _ in range(2):
                others = [engine.submit(prompt(30 + i, seed=20 + i), 60) for i in range(beside)]
                request = engine.submit(IDS, 60, **fields)
                tokens = engine.tokens(request)
                rows = [row.logprob for output in engine.outputs[request] for row in output.logprobs]
                found.append((tokens, rows))
                for other in others:
                    engine.wait(other)
    assert all(entry == found[0] for entry in found[1:])
