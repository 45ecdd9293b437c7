"""The KV cache's schemes through the whole engine, against the unquantized cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from native_engine import Native, store_of, tiny_llama
from test_native_scheduling import prompt
from transformers import Qwen2Config, Qwen2ForCausalLM

from turbomill import _core

PROMPT = prompt(150)


def divergence(exact: np.ndarray, other: np.ndarray) -> float:
    """Mean KL of the distributions of each position, in nats."""
    p, q = (torch.from_numpy(x).double().log_softmax(-1) for x in (exact, other))
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("kv") / "model"
    tiny_llama(path, num_hidden_layers=3)
    return store_of(path)


@pytest.fixture(scope="module")
def exact(store: Any) -> np.ndarray:
    with Native(store) as engine:
        return engine.logits(PROMPT)


@pytest.mark.parametrize("chunk", [1, 40, 512])
def test_rotation_changes_nothing_but_rounding(store: Any, exact: np.ndarray, chunk: int) -> None:
    """Nor does it that keys are stored less their centre."""
    with Native(store, kv_rotation=True, max_prefill_token_num=chunk) as engine:
        np.testing.assert_allclose(engine.logits(PROMPT), exact, atol=2e-4)


@pytest.mark.parametrize("heads", [{"head_dim": 24}, {"head_dim": 80}, {"head_dim": 96}])
def test_heads_whose_size_is_no_power_of_two(tmp_path: Path, heads: dict[str, int]) -> None:
    tiny_llama(tmp_path / "model", **heads)
    store = store_of(tmp_path / "model")
    with Native(store) as plain, Native(store, kv_rotation=True) as rotated:
        np.testing.assert_allclose(rotated.logits(PROMPT), plain.logits(PROMPT), atol=2e-4)


def test_a_softcap_sees_where_scores_lie(store: Any) -> None:
    """Keys of such a model are rotated, which scores do not see, but not centred."""
    model = dict(store.model, attention_softcap=2.0)
    logits = []
    for rotation in (False, True):
        fake = type("Capped", (), {"model": model, "tensors": store.tensors})
        capped = Native(fake, kv_rotation=rotation)  # type: ignore[arg-type]
        with capped as engine:
            logits.append(engine.logits(PROMPT))
    np.testing.assert_allclose(logits[1], logits[0], atol=2e-4)


SCHEMES = [
    {"quant_policy": 8},
    {"quant_policy": 16},
    {"quant_policy": 17},
    {"quant_policy": 84},
    {"quant_policy": 84, "kv_rotation": True},
    {"quant_policy": 4},
    {"quant_policy": 4, "kv_rotation": True},
    {"quant_policy": 4, "kv_rotation": True, "kv_16bit_layers": [0, 2]},
]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_is_near_the_exact_cache(store: Any, exact: np.ndarray, scheme: dict[str, Any]) -> None:
    """However a prompt is cut: what later tokens read is the same, but for codes at the border of two."""
    with Native(store, cache_dtype="float16", **scheme) as engine:
        whole = engine.logits(PROMPT)
    with Native(store, cache_dtype="float16", max_prefill_token_num=33, **scheme) as engine:
        assert divergence(whole, engine.logits(PROMPT)) < 0.1 * divergence(exact, whole)
    assert 0 < divergence(exact, whole) < (0.02 if scheme["quant_policy"] in (8, 16) else 1.0)


def test_layers_in_16_bits_bring_it_nearer(store: Any, exact: np.ndarray) -> None:
    kl = []
    for layers in ([], [1], [0, 1], [0, 1, 2]):
        with Native(store, cache_dtype="float16", quant_policy=4, kv_16bit_layers=layers) as engine:
            kl.append(divergence(exact, engine.logits(PROMPT)))
    with Native(store, cache_dtype="float16") as engine:
        assert kl[3] == divergence(exact, engine.logits(PROMPT))
    assert kl[0] > kl[2] > 10 * kl[3]


def biased(path: Path, biases: list[float]) -> Any:
    """A Qwen2 whose keys have these in some channels at every token, as those of Qwen2.5 do."""
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=320,
            hidden_size=128,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            initializer_range=0.15,
            tie_word_embeddings=False,
        )
    )
    for layer in model.model.layers:
        layer.self_attn.k_proj.bias.data[[13, 15, 32 + 14, 32 + 15]] = torch.tensor(biases)
    model.half().save_pretrained(path)
    return store_of(path)


def losses(store: Any) -> tuple[float, float]:
    """KL of int4, plain and rotated."""
    with Native(store) as engine:
        exact = engine.logits(PROMPT)
    found = []
    for rotation in (False, True):
        with Native(store, quant_policy=4, kv_rotation=rotation) as engine:
            found.append(divergence(exact, engine.logits(PROMPT)))
    return found[0], found[1]


def test_outliers_in_k_break_plain_int4_and_not_rotated(tmp_path: Path) -> None:
    """Rotated, the model with large channels in K loses about what the one without them loses anyway."""
    plain, rotated = losses(biased(tmp_path / "large", [150.0, -90.0, 120.0, 60.0]))
    usual, _ = losses(biased(tmp_path / "usual", [0.0, 0.0, 0.0, 0.0]))
    assert plain > 5 * usual and plain > 5 * rotated and rotated < 2 * usual


def test_bytes_of_a_block_by_hand(store: Any) -> None:
    """3 layers of 2 heads of 16: K and V rows, and a scale and zero of 16 bits each where they are codes."""
    model = _core.ModelConfig(**store.model)

    def row(**fields: Any) -> float:
        config = _core.EngineConfig(cache_block_count=1, block_len=8, cache_dtype="float16", **fields)
        return _core.cache_block_bytes(model, config) / 8 / 2

    assert row() == 3 * 2 * 32
    assert row(quant_policy=8) == row(quant_policy=16) == row(quant_policy=17) == 3 * 2 * (16 + 4)
    assert row(quant_policy=4, kv_rotation=True) == 3 * 2 * (8 + 4)
    assert row(quant_policy=84) == 3 * (16 + 8 + 2 * 4)
    assert row(quant_policy=4, kv_16bit_layers=[2, 0]) == 2 * (8 + 4) + 2 * 2 * 32
    with pytest.raises(ValueError, match="kv_16bit_layers names layer 3, the model has 3"):
        row(kv_16bit_layers=[3])
