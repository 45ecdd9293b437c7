"""Logits and greedy text of the whole path checkpoint -> store -> engine against transformers, in fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from native_engine import Native, store_of, tiny_llama

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "mha": {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 64, "hidden_size": 96},
    "gqa3": {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "hidden_size": 72},
    "gqa8": {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 64},
    "dim80": {"head_dim": 80},
    "dim96": {"head_dim": 96},
    "dim128": {"head_dim": 128},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "llama3_rope": {"rope_parameters": LLAMA3_ROPE},
    "odd_sizes": {"hidden_size": 88, "head_dim": 24, "intermediate_size": 120, "vocab_size": 333},
}


def prompt(length: int, vocab: int = 320, seed: int = 3) -> list[int]:
    return np.random.default_rng(seed).integers(3, vocab, length).tolist()


def reference_logits(model: torch.nn.Module, ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].float().numpy()


def reference_greedy(model: Any, ids: list[int], count: int) -> list[int]:
    out = model.generate(
        torch.tensor([ids]), max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return out[0, len(ids) :].tolist()


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / name, **MODELS[name])
    ids = prompt(150, model.config.vocab_size)
    expected = reference_logits(model, ids)
    assert np.abs(expected).max() > 0.5  # a model whose logits say something
    store = store_of(tmp_path / name)
    for budget in (512, 64, 7):
        with Native(store, max_prefill_token_num=budget) as engine:
            logits = engine.logits(ids)
            np.testing.assert_allclose(logits, expected, atol=1e-3)
    with Native(store, max_prefill_token_num=50) as engine:
        assert engine.generate(ids, 40) == reference_greedy(model, ids, 40)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_weights_are_used_as_they_are(dtype: torch.dtype, tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "half", dtype)
    ids = prompt(70)
    with Native(store_of(tmp_path / "half")) as engine:
        np.testing.assert_allclose(engine.logits(ids), reference_logits(model, ids), atol=1e-3)
        assert engine.generate(ids, 30) == reference_greedy(model, ids, 30)


@pytest.mark.parametrize("policy", [8, 4])
def test_quantized_cache_does_not_depend_on_chunks(policy: int, tmp_path: Path) -> None:
    """A chunk attends to what the cache holds, so the budget moves only what a flipped code moves."""
    model = tiny_llama(tmp_path / "kv", head_dim=64)
    store, ids = store_of(tmp_path / "kv"), prompt(130)
    results = []
    for budget in (512, 33):
        with Native(store, quant_policy=policy, max_prefill_token_num=budget) as engine:
            results.append(engine.logits(ids))
    assert np.quantile(np.abs(results[0] - results[1]), 0.99) < 2e-3
    error = np.abs(results[0] - reference_logits(model, ids)).mean()
    assert 1e-4 < error < {8: 0.02, 4: 0.5}[policy]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    path = tmp_path_factory.mktemp("shared") / "model"
    model = tiny_llama(path)
    return model, store_of(path)


@pytest.mark.parametrize("streams", [1, 7, 64])
def test_batch_composition_does_not_matter(streams: int, shared: tuple[Any, Any]) -> None:
    model, store = shared
    prompts = [prompt(5 + 11 * (i % 9), seed=i) for i in range(streams)]
    with Native(store, cache_block_count=512, max_prefill_token_num=96) as engine:
        together = [engine.tokens(r) for r in [engine.submit(p, 24) for p in prompts]]
    for p, tokens in list(zip(prompts, together, strict=True))[:8]:
        assert tokens == reference_greedy(model, p, 24)
    with Native(store) as engine:
        assert together == [engine.generate(p, 24) for p in prompts]


@pytest.mark.parametrize("length", [63, 64, 65, 127, 128, 129])
def test_prompts_at_block_borders(length: int, shared: tuple[Any, Any]) -> None:
    model, store = shared
    ids = prompt(length)
    with Native(store) as engine:
        assert engine.generate(ids, 8) == reference_greedy(model, ids, 8)


def test_logits_cross_to_torch_without_a_copy(tmp_path):
    tiny_llama(tmp_path / "model")
    with Native(store_of(tmp_path / "model")) as engine:
        (output, *_) = engine.wait(engine.submit([5, 6, 7], 0, return_logits=True))
        array = output.logits
        tensor = torch.from_dlpack(array)
        assert tensor.shape == (3, 320)
        assert tensor.data_ptr() == array.ctypes.data == output.logits.ctypes.data
        kept = tensor.clone()
    del output, array  # the rows live as long as somebody holds them
    assert torch.equal(tensor, kept)
