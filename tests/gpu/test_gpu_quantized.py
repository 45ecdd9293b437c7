"""4-bit stores on the GPU: logits against transformers on the dequantized weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from native_engine import Native, store_of, tiny_llama
from quantized_models import quantized
from test_native_quantized import CASES, FORMATS, MIXED, reordered

from turbomill import _core
from turbomill.convert.checkpoint import open_checkpoint
from turbomill.convert.formats.compressed_tensors import CompressedTensorsFormat
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


def close(path: Path, bound: float = 6e-3) -> Store:
    """The store of a checkpoint, whose logits are the dequantized model's however prompts are cut."""
    checkpoint, store = open_checkpoint(path), store_of(path)
    ids = np.random.default_rng(1).integers(3, 320, 500).tolist()
    with torch.no_grad():
        expected = load_dense_model(checkpoint)(torch.tensor([ids])).logits[0].numpy()
    for budget in (
        512,
        60,
        5,
    ):  # as dense matrices, where there are such; in place, with and without rounding
        with Native(store, device="cuda", max_prefill_token_num=budget, cache_dtype="float16") as engine:
            logits = engine.logits(ids)
            assert np.linalg.norm(logits - expected) < bound * np.linalg.norm(expected)
    return store


BOUND = {torch.float16: 6e-3, torch.bfloat16: 4e-2}


def weight_bytes(store: Store) -> int:
    """What its weights take on the GPU."""
    refs = [
        _core.TensorRef(t.name, t.layout, t.dtype, t.shape, str(t.path), t.offset, t.nbytes)
        for t in store.tensors.values()
    ]
    return _core.kernels_cuda.weight_bytes(_core.ModelConfig(**store.model), refs)


def stays_as_it_is(store: Store) -> None:
    """Weights take what they take in the store, but for alignment and vectors, which become fp32."""
    taken = sum(t.nbytes * (2 if t.layout == "vector" else 1) for t in store.tensors.values())
    assert weight_bytes(store) <= taken + 256 * len(store.tensors)


@pytest.mark.parametrize("bits", [5, 8])
@pytest.mark.parametrize(
    ("kind", "group", "symmetric", "dtype"),
    [
        ("gptq", 32, True, torch.float16),
        ("gptq", 128, False, torch.bfloat16),
        ("ct", 64, False, torch.float16),
        ("ct", 128, True, torch.bfloat16),
        ("ct", 32, False, torch.bfloat16),
    ],
)
def test_more_than_4_bits(
    kind: str, group: int, symmetric: bool, dtype: torch.dtype, bits: int, tmp_path: Path
) -> None:
    if kind == "gptq" and bits == 5:
        pytest.skip("GPTQ has no 5 bits")
    tiny_llama(tmp_path / "dense", dtype, hidden_size=128, intermediate_size=256, attention_bias=True)
    path = quantized(tmp_path / "dense", FORMATS[kind](QuantScheme(bits, group, symmetric)), dtype)
    store = close(path, BOUND[dtype])
    assert store.tensors["layers.0.w_qkv.qweight"].layout == "w8.n64k64"
    stays_as_it_is(store)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_mixed_precision(dtype: torch.dtype, tmp_path: Path) -> None:
    tiny_llama(tmp_path / "dense", dtype, hidden_size=128, intermediate_size=256)
    path = quantized(tmp_path / "dense", CompressedTensorsFormat(MIXED["Linear"], MIXED), dtype)
    stays_as_it_is(close(path, BOUND[dtype]))


@pytest.mark.parametrize("tied", [True, False])
def test_embedding_and_output_matrix_keep_their_codes(tied: bool, tmp_path: Path) -> None:
    """GGUF's Q8_0 throughout: one copy of a tied embedding, as codes, serves tokens and logits."""
    gguf = pytest.importorskip("gguf")
    from architectures import CASES as MODELS
    from gguf_models import write_model

    model = MODELS["qwen2"].make(tmp_path / "dense", tie_word_embeddings=tied)
    kind = gguf.GGMLQuantizationType.Q8_0
    write_model(
        tmp_path / "m.gguf", "qwen2", tmp_path / "dense", model.config, lambda _: kind, vocabulary=kind
    )
    store = close(tmp_path / "m.gguf")
    assert store.tensors["tok_embeddings.qweight"].layout == "w8.n64k64"
    assert ("output.qweight" in store.tensors) != tied
    stays_as_it_is(store)


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
