"""The path checkpoint -> store -> engine on the GPU, against transformers in fp32 and the CPU backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from native_engine import Native, store_of, tiny_llama
from test_native_parity import MODELS, prompt, reference_greedy, reference_logits

from turbomill import _core

TORCH = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# ||logits - reference|| / ||reference|| of a few layers whose activations are rounded to the format.
LOGITS = {"float32": 1e-4, "float16": 4e-3, "bfloat16": 3e-2}


SCHEMES = [
    {"quant_policy": 8},
    {"quant_policy": 4},
    {"quant_policy": 4, "kv_rotation": True},
    {"quant_policy": 4, "kv_rotation": True, "kv_16bit_layers": [1]},
    {"quant_policy": 84, "kv_rotation": True},
    {"quant_policy": 16},
    {"quant_policy": 17},
]


def gpu(store: Any, **config: Any) -> Native:
    return Native(store, device="cuda", **config)


def error(logits: np.ndarray, expected: np.ndarray) -> float:
    assert np.isfinite(logits).all()
    return float(np.linalg.norm(logits - expected) / np.linalg.norm(expected))


def assert_greedy(model: Any, ids: list[int], tokens: list[int], slack: float) -> None:
    """Every token is, up to `slack`, the reference's likeliest after what precedes it."""
    logits = reference_logits(model, ids + tokens)[len(ids) - 1 : -1]
    chosen = logits[np.arange(len(tokens)), tokens]
    assert (logits.max(1) - chosen).max() <= slack


@pytest.mark.parametrize("dtype", TORCH)
@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(name: str, dtype: str, tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / name, TORCH[dtype], **MODELS[name])
    ids = prompt(150, model.config.vocab_size)
    expected = reference_logits(model, ids)
    store = store_of(tmp_path / name)
    for budget in (512, 64, 7):
        with gpu(store, max_prefill_token_num=budget, cache_dtype=dtype) as engine:
            assert error(engine.logits(ids), expected) < LOGITS[dtype], budget
    with gpu(store, max_prefill_token_num=50, cache_dtype=dtype) as engine:
        tokens = engine.generate(ids, 40)
        assert_greedy(model, ids, tokens, 10 * LOGITS[dtype] * float(np.abs(expected).mean()))
        if dtype == "float32":
            assert tokens == reference_greedy(model, ids, 40)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_no_further_from_fp32_than_transformers_in_the_same_format(dtype: str, tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "deep", TORCH[dtype], num_hidden_layers=12, hidden_size=128, head_dim=64)
    ids = prompt(200)
    expected = reference_logits(model, ids)
    with gpu(store_of(tmp_path / "deep"), cache_dtype=dtype) as engine:
        ours = error(engine.logits(ids), expected)
    theirs = error(reference_logits(model.to(TORCH[dtype]), ids), expected)
    print(f"{dtype}: ours {ours:.2e}, transformers {theirs:.2e}")
    assert ours < 1.2 * theirs


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    path = tmp_path_factory.mktemp("gpu") / "model"
    model = tiny_llama(path, head_dim=64)
    return model, store_of(path)


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    path = tmp_path_factory.mktemp("gpu") / "half"
    model = tiny_llama(path, torch.float16, head_dim=64)
    return model, store_of(path)


@pytest.mark.parametrize("streams", [1, 7, 64])
def test_batch_composition_does_not_matter(streams: int, shared: tuple[Any, Any]) -> None:
    model, store = shared
    prompts = [prompt(5 + 11 * (i % 9), seed=i) for i in range(streams)]
    with gpu(store, cache_block_count=512, max_prefill_token_num=96) as engine:
        together = [engine.tokens(r) for r in [engine.submit(p, 24) for p in prompts]]
    for p, tokens in list(zip(prompts, together, strict=True))[:8]:
        assert tokens == reference_greedy(model, p, 24)
    with gpu(store) as engine:
        assert together == [engine.generate(p, 24) for p in prompts]


@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 127, 128, 129])
def test_prompts_at_block_borders(length: int, shared: tuple[Any, Any], half: tuple[Any, Any]) -> None:
    ids = prompt(length)
    model, store = shared
    with gpu(store) as engine:
        assert engine.generate(ids, 8) == reference_greedy(model, ids, 8)
    model, store = half
    with gpu(store, cache_dtype="float16") as engine:
        assert_greedy(model, ids, engine.generate(ids, 8), 0.05)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantized_cache_equals_the_cpu_backend(scheme: dict[str, Any], shared: tuple[Any, Any]) -> None:
    """Keys and values get the same codes, but for those that fp32's last bit moves."""
    pytest.importorskip("scipy_openblas64", reason="the CPU backend needs it")
    _, store = shared
    ids = prompt(150)
    with Native(store, **scheme) as engine:
        expected = engine.logits(ids)
    for budget in (512, 33):
        with gpu(store, max_prefill_token_num=budget, **scheme) as engine:
            assert np.quantile(np.abs(engine.logits(ids) - expected), 0.99) < 6e-3


@pytest.mark.parametrize(("policy", "bound"), [(8, 0.03), (4, 0.3)])
def test_quantized_cache_in_16_bits(policy: int, bound: float, half: tuple[Any, Any]) -> None:
    model, store = half
    ids = prompt(300)
    expected = reference_logits(model, ids)
    for budget in (512, 33):
        with gpu(store, quant_policy=policy, max_prefill_token_num=budget) as engine:
            assert 1e-4 < error(engine.logits(ids), expected) < bound
    with gpu(store, quant_policy=8) as engine:
        assert_greedy(model, ids, engine.generate(ids, 30), 0.3)


def test_long_contexts_split_their_keys(half: tuple[Any, Any]) -> None:
    """Decodes whose keys are cut into parts, beside a short one and a prompt, whatever the batch."""
    model, store = half
    prompts = [prompt(n, seed=n) for n in (480, 3, 257, 400)]
    with gpu(store, cache_dtype="float16", cache_block_count=128) as engine:
        together = [engine.tokens(r) for r in [engine.submit(p, 30) for p in prompts]]
    for p, tokens in zip(prompts, together, strict=True):
        assert_greedy(model, p, tokens, 0.05)


@pytest.mark.parametrize("scheme", [{}, {"quant_policy": 8}, {"quant_policy": 4}, *SCHEMES[2:6]])
def test_recorded_steps_give_the_same_tokens(scheme: dict[str, Any], half: tuple[Any, Any]) -> None:
    """As CUDA graphs and call by call, while the batch grows, shrinks and mixes with prompts."""
    _, store = half
    prompts = [prompt(3 + 17 * (i % 7), seed=i) for i in range(20)]
    texts, recorded = [], []
    for eager in (False, True):
        config = {"cache_dtype": "float16", "cache_block_count": 256} | scheme
        with gpu(store, eager_mode=eager, max_batch_size=24, **config) as engine:
            alone = engine.generate(prompts[0], 40)
            requests = [
                engine.submit(p, 5 + 4 * i, temperature=0.0 if i % 2 else 0.9, top_k=20, seed=i)
                for i, p in enumerate(prompts)
            ]
            texts.append([alone, *(engine.tokens(r) for r in requests)])
            recorded.append(engine.engine.metrics().recorded_steps)
    assert texts[0] == texts[1]
    assert [len(t) for t in texts[0]] == [40, *(5 + 4 * i for i in range(20))]
    assert recorded[0] > 60
    assert recorded[1] == 0


def test_the_next_step_is_issued_while_one_runs(half: tuple[Any, Any]) -> None:
    """Steps in flight share pinned buffers in turn: many short requests at once keep their own tokens."""
    model, store = half
    prompts = [prompt(2 + i % 5, seed=i) for i in range(60)]
    with gpu(store, cache_dtype="float16", max_batch_size=7) as engine:
        texts = [engine.tokens(r) for r in [engine.submit(p, 1 + i % 4) for i, p in enumerate(prompts)]]
    for i, (p, text) in enumerate(zip(prompts, texts, strict=True)):
        assert len(text) == 1 + i % 4
        assert_greedy(model, p, text, 0.05)


def test_preemption_changes_no_text(shared: tuple[Any, Any]) -> None:
    _, store = shared
    prompts = [prompt(40 + i, seed=i) for i in range(6)]
    fields = {"temperature": 1.0, "seed": 5}
    with gpu(store, cache_block_count=64) as engine:
        expected = [engine.generate(p, 120, **fields) for p in prompts]
    with gpu(store, cache_block_count=6) as engine:
        assert [engine.tokens(r) for r in [engine.submit(p, 120, **fields) for p in prompts]] == expected
        assert engine.engine.metrics().preemptions > 0
        assert engine.engine.metrics().healthy


@pytest.mark.parametrize("fields", [{"top_k": 40}, {"top_p": 0.9}, {"top_k": 50, "top_p": 0.8}, {}])
def test_samples_are_the_cpu_backends(fields: Any, shared: tuple[Any, Any]) -> None:
    pytest.importorskip("scipy_openblas64", reason="the CPU backend needs it")
    _, store = shared
    texts = []
    for device in ("cpu", "cuda"):
        with Native(store, device=device) as engine:
            texts.append(
                [engine.generate(prompt(20), 60, temperature=0.9, seed=s, **fields) for s in range(4)]
            )
    assert texts[0] == texts[1]
    assert texts[0][0] != texts[0][1]


def test_logits_that_are_not_finite_fail_that_request_alone(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = tmp_path / "nan"
    tiny_llama(path)
    weights = {k: v.float() for k, v in load_file(path / "model.safetensors").items()}
    weights["model.embed_tokens.weight"][7] = float("nan")
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    with gpu(store_of(path)) as engine:
        bad, good = engine.submit([5, 7, 6], 5), engine.submit([5, 6, 8], 5)
        assert engine.wait(bad)[-1].finish_reason == "error"
        assert "not finite" in engine.wait(bad)[-1].error
        assert len(engine.tokens(good)) == 5
        assert engine.engine.metrics().healthy


def test_prompt_logits_beside_a_running_stream(shared: tuple[Any, Any]) -> None:
    model, store = shared
    ids = prompt(200)
    with gpu(store, max_prefill_token_num=90, max_batch_size=8) as engine:
        stream = engine.submit(prompt(9), 200)
        logits = engine.logits(ids)
        assert engine.tokens(stream) == reference_greedy(model, prompt(9), 200)
    np.testing.assert_allclose(logits, reference_logits(model, ids), atol=1e-3)


def test_two_engines_in_one_process(shared: tuple[Any, Any]) -> None:
    _, store = shared
    with gpu(store) as first, gpu(store, quant_policy=8) as second:
        requests = [(e, e.submit(prompt(30), 40)) for e in (first, second, first)]
        texts = [e.tokens(r) for e, r in requests]
    assert texts[0] == texts[2]
    assert all(len(text) == 40 for text in texts)


def test_close_frees_the_gpus_memory(shared: tuple[Any, Any]) -> None:
    _, store = shared
    before = _core.cuda_devices()[0]["free_bytes"]
    engine = gpu(store, cache_block_count=2**16)  # gigabytes of cache
    assert len(engine.generate(prompt(5), 3)) == 3
    held = before - _core.cuda_devices()[0]["free_bytes"]
    engine.close()
    assert held > 2**31
    assert before - _core.cuda_devices()[0]["free_bytes"] < held / 2  # other tests may share the GPU
    assert engine.engine.metrics().generated_tokens == 3


def test_the_demo_models_shape(tmp_path: Path) -> None:
    """SmolLM2-135M's sizes with random weights: fp16 on the GPU against fp32 in transformers."""
    sizes = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}
    model = tiny_llama(tmp_path / "demo", torch.float16, initializer_range=0.04, **sizes, **heads)
    ids = prompt(300, 49152)
    expected = reference_logits(model, ids)
    store = store_of(tmp_path / "demo")
    with gpu(store, cache_dtype="float16") as engine:
        assert error(engine.logits(ids), expected) < 2e-2
        tokens = engine.generate(ids, 30)
        assert_greedy(model, ids, tokens, 0.05 * float(np.abs(expected).max()))
