"""4-bit stores on the GPU: logits against transformers on the dequantized weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from native_engine import Native, store_of, tiny_llama
from quantized_models import quantized
from test_native_quantized import CASES, FORMATS, reordered

from turbomill.convert.checkpoint import open_checkpoint
from turbomill.convert.formats.gptq import GptqFormat
from turbomill.convert.linear import QuantScheme
from turbomill.convert.reference import load_dense_model
from turbomill.convert.store import Store


@pytest.mark.parametrize("dense_dtype", [None, torch.float32])
@pytest.mark.parametrize(("kind", "group", "symmetric", "dtype"), CASES)
def test_logits_equal_the_dequantized_model(
    kind: str,
    group: int,
    symmetric: bool,
    dtype: torch.dtype,
    dense_dtype: torch.dtype | None,
    tmp_path: Path,
) -> None:
    """`dense_dtype` of embeddings and norms: the scales', or fp32, from which the backend goes to 16 bits."""
    tiny_llama(
        tmp_path / "dense", dense_dtype or dtype, hidden_size=128, intermediate_size=256, attention_bias=True
    )
    scheme = QuantScheme(4, group, symmetric)
    path = quantized(tmp_path / "dense", FORMATS[kind](scheme), dtype)
    model = load_dense_model(open_checkpoint(path)).eval()
    ids = np.random.default_rng(1).integers(3, 320, 300).tolist()
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].numpy()
    bound = {torch.float16: 6e-3, torch.bfloat16: 4e-2}[dtype]
    store = store_of(path)
    for budget in (512, 40, 5):  # as a dense matrix, in place in two goes, in place
        with Native(store, device="cuda", max_prefill_token_num=budget, cache_dtype="float16") as engine:
            logits = engine.logits(ids)
            assert np.linalg.norm(logits - expected) < bound * np.linalg.norm(expected)
            tokens = engine.generate(ids, 20)
    with torch.no_grad():
        after = model(torch.tensor([ids + tokens])).logits[0].numpy()[len(ids) - 1 : -1]
    assert (after.max(1) - after[np.arange(20), tokens]).max() <= 10 * bound * np.abs(expected).mean()


def close(path: Path) -> Store:
    """A store whose linears have what the 4-bit kernels do not read: they are expanded when it is loaded."""
    checkpoint, store = open_checkpoint(path), store_of(path)
    ids = np.random.default_rng(1).integers(3, 320, 300).tolist()
    with torch.no_grad():
        expected = load_dense_model(checkpoint)(torch.tensor([ids])).logits[0].numpy()
    for budget in (512, 5):
        with Native(store, device="cuda", max_prefill_token_num=budget, cache_dtype="float16") as engine:
            logits = engine.logits(ids)
            assert np.linalg.norm(logits - expected) < 6e-3 * np.linalg.norm(expected)
    return store


def test_minima(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    from architectures import CASES as MODELS
    from gguf_models import write_model

    model = MODELS["qwen2"].make(tmp_path / "dense")
    kind = gguf.GGMLQuantizationType
    mixed = lambda name: kind.Q4_0 if "attn_q" in name else kind.Q4_1  # noqa: E731
    write_model(tmp_path / "m.gguf", "qwen2", tmp_path / "dense", model.config, mixed)
    close(tmp_path / "m.gguf")


def test_an_order_of_inputs(tmp_path: Path) -> None:
    tiny_llama(tmp_path / "dense", torch.float16, hidden_size=128, intermediate_size=256)
    path = quantized(tmp_path / "dense", GptqFormat(QuantScheme(4, 32, False)), torch.float16)
    reordered(path, same=True)
    store = close(path)
    assert any(name.endswith(".order") for name in store.tensors)
