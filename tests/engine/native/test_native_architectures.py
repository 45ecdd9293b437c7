"""Every architecture, checkpoint -> store -> engine, against transformers: dense, 4-bit, and with a KV cache
of 8 bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from architectures import CASES, Case
from native_engine import Native, store_of
from quantized_models import quantized
from torch_threads import one_thread  # noqa: F401

from turbomill import _core
from turbomill.convert.checkpoint import open_checkpoint
from turbomill.convert.formats.awq import AwqFormat
from turbomill.convert.formats.gptq import GptqFormat
from turbomill.convert.linear import QuantScheme
from turbomill.convert.models.base import architectures
from turbomill.convert.store import Store
from turbomill.convert.writer import CheckpointWriter

LONGEST = 150  # several blocks of the cache, and many times every window


def prompt(case: Case, seed: int = 3) -> list[int]:
    length = min(LONGEST, case.session_len - 24)
    return np.random.default_rng(seed).integers(3, 320, length).tolist()


def logits_of(model: Any, ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].numpy()


def greedy(model: Any, ids: list[int], count: int) -> list[int]:
    """Without a cache: transformers' own would mix longrope's tables."""
    ids = list(ids)
    for _ in range(count):
        ids.append(int(logits_of(model, ids)[-1].argmax()))
    return ids[-count:]


def agree(store: Store, case: Case, model: Any, budgets: tuple[int, ...]) -> None:
    ids = prompt(case)
    expected = logits_of(model, ids)
    assert np.abs(expected).max() > 0.5  # logits that say something
    for budget in budgets:
        with Native(store, session_len=case.session_len, max_prefill_token_num=budget) as engine:
            np.testing.assert_allclose(engine.logits(ids), expected, atol=1e-3, rtol=0)
    with Native(store, session_len=case.session_len, max_prefill_token_num=50) as engine:
        assert engine.generate(ids, 8) == greedy(model, ids, 8)


def dequantized(path: Path, dst: Path) -> Path:
    """The checkpoint with its linears in fp32."""
    source = open_checkpoint(path)
    linears = source.arch.linear_prefixes(source.config)
    config = {key: value for key, value in source.config.items() if key != "quantization_config"}
    with CheckpointWriter(dst, config) as writer:
        for name in source.names():
            if name.rpartition(".")[0] not in linears:
                writer.add(name, source.tensor(name))
        for prefix in linears:
            linear = source.linear(prefix)
            writer.add(f"{prefix}.weight", linear.dequantize())
            if linear.bias is not None:
                writer.add(f"{prefix}.bias", linear.bias)
    return dst


def test_every_architecture_has_a_case() -> None:
    tested = {case.architecture for case in CASES.values()} | {"LlamaForCausalLM"}  # test_native_parity
    assert tested == {arch.name for arch in architectures()}


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model = case.make(tmp_path / "dense")
    store = store_of(tmp_path / "dense")
    assert store.manifest["architecture"] == case.architecture
    agree(store, case, model, (512, 37))
    ids = prompt(case)
    with Native(store, session_len=case.session_len, quant_policy=8) as engine:
        error = np.abs(engine.logits(ids) - logits_of(model, ids))
        assert 1e-5 < np.median(error) < 0.03  # not the mean: a router's flip moves a whole row


@pytest.mark.parametrize("name", CASES)
def test_every_field_matters(name: str, tmp_path: Path) -> None:
    """A model whose field is put back to Llama's value is refused or gives other logits."""
    case = CASES[name]
    model = case.make(tmp_path / "dense")
    store = store_of(tmp_path / "dense")
    ids = prompt(case)
    expected = logits_of(model, ids)
    for variant in _core.ModelConfig(**store.model).variants():
        fields = {key: value for key, value in store.model.items() if key != variant}
        changed = Store(store.path, {**store.manifest, "model": fields})
        try:
            with Native(changed, session_len=case.session_len) as engine:
                difference = np.abs(engine.logits(ids) - expected).max()
        except (ValueError, RuntimeError):
            continue
        # A session within the original context uses the first table with or without a second.
        inert = variant == "rope_original_context" and case.session_len <= fields.get(variant, 128)
        assert inert or difference > 5e-3, variant


@pytest.mark.parametrize("name", CASES)
def test_4_bit_logits_equal_the_dequantized_model(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model = case.make(tmp_path / "dense", torch.float16)
    if list(CASES).index(name) % 2:
        scheme = QuantScheme(4, 64, False)
        form = AwqFormat(scheme)
    else:
        scheme = QuantScheme(4, 32, True)
        form = GptqFormat(scheme, version=2)
    path = quantized(tmp_path / "dense", form, torch.float16)
    dense = dequantized(path, tmp_path / "dequantized")
    store = store_of(path)
    assert any(tensor.layout == "w4.n64k64" for tensor in store.tensors.values())
    agree(store, case, case.reference(dense, model.config), (512, 5))


@pytest.mark.parametrize("name", ["gemma3", "qwen2-moe"])
def test_a_batch_is_its_sequences(name: str, tmp_path: Path) -> None:
    """Windows are each sequence's own, and rows of all sequences share an expert."""
    case = CASES[name]
    case.make(tmp_path / "dense")
    store = store_of(tmp_path / "dense")
    prompts = [prompt(case, seed)[: 9 + 31 * seed] for seed in range(5)]
    with Native(store, max_prefill_token_num=96) as engine:
        together = [engine.tokens(request) for request in [engine.submit(ids, 16) for ids in prompts]]
    with Native(store) as engine:
        assert together == [engine.generate(ids, 16) for ids in prompts]


def test_a_backend_can_refuse_variants(tmp_path: Path) -> None:
    CASES["qwen3"].make(tmp_path / "dense")
    model = _core.ModelConfig(**store_of(tmp_path / "dense").model)
    assert model.variants() == ["qk_norm"]
    _core.require_known_variants(model, "cuda", ["qk_norm", "rotary_dim"])
    with pytest.raises(ValueError, match="the cuda backend does not support this model's qk_norm"):
        _core.require_known_variants(model, "cuda", ["rotary_dim"])
    assert _core.ModelConfig(vocab_size=8).variants() == []
