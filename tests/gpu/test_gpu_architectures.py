"""Every architecture on the GPU, checkpoint -> store -> engine, against transformers in fp32: dense in each
type, 4-bit, quantized caches; whole prompts, chunks and decodes; heads of each size whose kernels differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gpu_tolerance
import numpy as np
import pytest
import torch
from architectures import CASES, Case
from native_engine import Native, store_of
from quantized_models import quantized
from test_native_architectures import dequantized, logits_of, prompt

from turbomill.convert.formats.awq import AwqFormat
from turbomill.convert.formats.gptq import GptqFormat
from turbomill.convert.linear import QuantScheme
from turbomill.convert.models.base import architectures

NAMES = list(CASES)
TYPES = ["float32", "float16", "bfloat16"]
TORCH = gpu_tolerance.TORCH
SLACK = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.3}  # of a greedy token's logit, beside their size


def flips(case: Case) -> bool:
    return "Moe" in case.architecture or "Mixtral" in case.architecture


def sized(name: str, head_dim: int) -> dict[str, Any]:
    """Changes that give a case heads of this size."""
    hidden = 4 * head_dim
    changes: dict[str, Any] = {
        "hidden_size": hidden,
        "head_dim": head_dim,
        "initializer_range": 0.15 * (64 / hidden) ** 0.5,
    }
    if name in ("phi3-short", "phi3-long"):  # longrope has a factor for each frequency
        half = head_dim * 3 // 8
        factors = {"short_factor": np.linspace(1, 1.5, half), "long_factor": np.linspace(1, 6, half)}
        changes["rope_parameters"] = CASES[name].fields["rope_parameters"] | {
            key: value.tolist() for key, value in factors.items()
        }
    return changes


def agree(store: Any, case: Case, model: Any, dtype: str, budgets: tuple[int, ...], **config: Any) -> None:
    """Logits by each budget of a step's prompt tokens, and greedy tokens."""
    ids = prompt(case)
    expected = logits_of(model, ids)
    assert np.abs(expected).max() > 0.5  # logits that say something
    config = {"device": "cuda", "session_len": case.session_len, "cache_dtype": dtype} | config
    for budget in budgets:
        with Native(store, max_prefill_token_num=budget, **config) as engine:
            logits = engine.logits(ids)
        gpu_tolerance.assert_logits(logits, expected, gpu_tolerance.LOGITS[dtype], flips(case))
    with Native(store, max_prefill_token_num=50, **config) as engine:
        tokens = engine.generate(ids, 20)
    after = logits_of(model, ids + tokens)[len(ids) - 1 : -1]
    behind = after.max(1) - after[np.arange(20), tokens]
    slack = SLACK[dtype] * float(np.abs(expected).max())
    assert (np.quantile(behind, 0.75) if flips(case) else behind.max()) <= slack


def test_every_architecture_is_run() -> None:
    tested = {case.architecture for case in CASES.values()} | {"LlamaForCausalLM"}  # test_gpu_engine
    assert tested == {arch.name for arch in architectures()}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_transformers(name: str, dtype: str, tmp_path: Path) -> None:
    case = CASES[name]
    model = case.make(tmp_path / "dense", TORCH[dtype])
    agree(store_of(tmp_path / "dense"), case, model, dtype, (512, 37, 5))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("name", NAMES)
def test_larger_heads(name: str, head_dim: int, dtype: str, tmp_path: Path) -> None:
    case = CASES[name]
    if (NAMES.index(name) + head_dim // 32 + (dtype == "float16")) % 2:
        pytest.skip("every second of these, for time")
    model = case.make(tmp_path / "dense", TORCH[dtype], **sized(name, head_dim))
    agree(store_of(tmp_path / "dense"), case, model, dtype, (512, 37))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_4_bit_logits_equal_the_dequantized_model(name: str, dtype: str, tmp_path: Path) -> None:
    case = CASES[name]
    model = case.make(tmp_path / "dense", TORCH[dtype])
    if (NAMES.index(name) + (dtype == "float16")) % 2:
        form = AwqFormat(QuantScheme(4, 64, False))
    else:
        form = GptqFormat(QuantScheme(4, 32, True), version=2)
    path = quantized(tmp_path / "dense", form, TORCH[dtype])
    dense = dequantized(path, tmp_path / "dequantized")
    store = store_of(path)
    assert any(tensor.layout == "w4.n64k64" for tensor in store.tensors.values())
    agree(store, case, case.reference(dense, model.config), dtype, (512, 5))


@pytest.mark.parametrize(("policy", "bound"), [(8, 0.03), (4, 0.4)])
@pytest.mark.parametrize("name", NAMES)
def test_quantized_cache(name: str, policy: int, bound: float, tmp_path: Path) -> None:
    """As near to the 16-bit cache's logits as codes allow, at sizes whose kernels differ."""
    case = CASES[name]
    changes = sized(name, 64 if NAMES.index(name) % 2 else 128)
    model = case.make(tmp_path / "dense", torch.float16, **changes)
    store = store_of(tmp_path / "dense")
    ids = prompt(case)
    expected = logits_of(model, ids)
    config = {"device": "cuda", "session_len": case.session_len, "cache_dtype": "float16"}
    for budget in (512, 33):
        with Native(store, quant_policy=policy, max_prefill_token_num=budget, **config) as engine:
            logits = engine.logits(ids)
            tokens = engine.generate(ids, 8)
        gpu_tolerance.assert_logits(logits, expected, bound, flips(case))
        assert len(tokens) == 8


@pytest.mark.parametrize("name", ["gemma3", "mistral-window", "qwen3", "qwen2-moe", "phi3"])
def test_prompts_at_block_borders(name: str, tmp_path: Path) -> None:
    """Of the cache's blocks, of tiles of keys, and of windows."""
    case = CASES[name]
    model = case.make(tmp_path / "dense", torch.float16, **sized(name, 64))
    ids = np.random.default_rng(3).integers(3, 320, 400).tolist()
    with Native(
        store_of(tmp_path / "dense"), device="cuda", session_len=512, cache_dtype="float16", max_batch_size=8
    ) as engine:
        for length in (1, 15, 16, 17, 24, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 400):
            logits, expected = engine.logits(ids[:length]), logits_of(model, ids[:length])
            gpu_tolerance.assert_logits(logits, expected, 2 * gpu_tolerance.LOGITS["float16"], flips(case))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", ["gemma2", "gemma3", "qwen2-moe", "qwen3-moe"])
def test_a_batch_is_its_sequences(name: str, dtype: str, tmp_path: Path) -> None:
    """Windows are each sequence's own, and rows of all sequences share an expert; as graphs and without."""
    case = CASES[name]
    case.make(tmp_path / "dense", TORCH[dtype], **(sized(name, 64) if dtype == "float16" else {}))
    store = store_of(tmp_path / "dense")
    prompts = [prompt(case, seed)[: 9 + 31 * seed] for seed in range(5)]
    config = {"device": "cuda", "cache_dtype": dtype}
    together = []
    for eager in (False, True):
        with Native(store, max_prefill_token_num=96, eager_mode=eager, **config) as engine:
            together.append([engine.tokens(r) for r in [engine.submit(ids, 24) for ids in prompts]])
            recorded = engine.engine.metrics().recorded_steps
            assert (recorded > 0) == (not eager and dtype == "float16")
    assert together[0] == together[1]
    if dtype == "float32":
        with Native(store, **config) as engine:
            assert together[0] == [engine.generate(ids, 24) for ids in prompts]
