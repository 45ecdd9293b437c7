"""Quantized stores: engine logits against transformers on the dequantized weights, for each way to pack."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from native_engine import Native, store_of, tiny_llama
from quantized_models import quantized
from safetensors.torch import load_file, save_file

from turbomill import _core
from turbomill.convert.checkpoint import open_checkpoint
from turbomill.convert.formats.awq import AwqFormat
from turbomill.convert.formats.compressed_tensors import CompressedTensorsFormat
from turbomill.convert.formats.gptq import GptqFormat
from turbomill.convert.linear import QuantScheme
from turbomill.convert.reference import load_dense_model
from turbomill.convert.store.verify import check_tensors_against

ACTIVATION_BITS = (32, 16) if _core.cpu_features()["int8"] else (32,)
ATOL = {32: 1e-3, 16: 3e-3}  # two bytes round inputs to 2^-16 of the largest of 64
FORMATS = {"awq": AwqFormat, "gptq": partial(GptqFormat, version=2), "ct": CompressedTensorsFormat}
CASES = [
    ("awq", 32, False, torch.float16),
    ("awq", 64, False, torch.float16),
    ("awq", 128, False, torch.bfloat16),
    ("gptq", 64, True, torch.float16),
    ("gptq", 32, True, torch.bfloat16),
    ("gptq", 128, False, torch.float16),
    ("ct", 64, False, torch.float16),
    ("ct", 128, True, torch.bfloat16),
]


@pytest.mark.parametrize(("kind", "group", "symmetric", "dtype"), CASES)
def test_logits_equal_the_dequantized_model(
    kind: str, group: int, symmetric: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    tiny_llama(tmp_path / "dense", dtype, hidden_size=128, intermediate_size=256, attention_bias=True)
    scheme = QuantScheme(4, group, symmetric)
    fmt = FORMATS[kind](scheme)
    path = quantized(tmp_path / "dense", fmt, dtype)
    model = load_dense_model(open_checkpoint(path)).eval()
    ids = np.random.default_rng(1).integers(3, 320, 100).tolist()
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].numpy()
    store = store_of(path)
    for bits in ACTIVATION_BITS:
        for budget in (512, 5):  # through BLAS panels, and through the small-batch kernels
            with Native(store, max_prefill_token_num=budget, activation_bits=bits) as engine:
                np.testing.assert_allclose(engine.logits(ids), expected, atol=ATOL[bits])
    greedy = model.generate(
        torch.tensor([ids]), max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    for bits in ACTIVATION_BITS:
        with Native(store, activation_bits=bits) as engine:
            assert engine.generate(ids, 20) == greedy[0, 100:].tolist()


@pytest.mark.skipif(len(ACTIVATION_BITS) < 2, reason="this CPU has no AVX-512 VNNI")
def test_activations_of_one_byte_lose_a_little(tmp_path: Path) -> None:
    tiny_llama(tmp_path / "dense", torch.float16, hidden_size=128, intermediate_size=256)
    store = store_of(quantized(tmp_path / "dense", AwqFormat(QuantScheme(4, 64, False)), torch.float16))
    ids = np.random.default_rng(1).integers(3, 320, 100).tolist()
    found = {}
    for bits in (32, 16, 8):
        with Native(store, activation_bits=bits) as engine:
            found[bits] = engine.logits(ids)
    size = np.linalg.norm(found[32])
    two, one = (np.linalg.norm(found[bits] - found[32]) / size for bits in (16, 8))
    assert two < 5e-4 < one < 0.05


def reordered(path: Path, same: bool) -> None:
    """Rows as desc_act leaves them: in an order of the input, or of each linear, with the groups to match."""
    tensors = load_file(path / "model.safetensors")
    orders: dict[tuple[str, int], torch.Tensor] = {}
    for name in [name for name in tensors if name.endswith(".g_idx")]:
        k = tensors[name].shape[0]
        layer, part = name.rsplit(".", 3)[0], name.split(".")[-2]
        shared = "qkv" if part[0] in "qkv" else "gate_up" if part in ("gate_proj", "up_proj") else part
        order = orders.setdefault((f"{layer}.{shared if same else part}", k), torch.randperm(k))
        tensors[name] = tensors[name][order].contiguous()
    save_file(tensors, path / "model.safetensors")


@pytest.mark.parametrize("same", [True, False])
def test_desc_act_is_served(same: bool, tmp_path: Path) -> None:
    """Packed with the order of its inputs where all fused parts share it, else dense."""
    tiny_llama(tmp_path / "dense", torch.float16, hidden_size=128, intermediate_size=224, attention_bias=True)
    path = quantized(tmp_path / "dense", GptqFormat(QuantScheme(4, 32, False), 1), torch.float16)
    torch.manual_seed(0)
    reordered(path, same)
    checkpoint, store = open_checkpoint(path), store_of(path)
    assert check_tensors_against(store, checkpoint).ok
    orders = {name for name in store.tensors if name.startswith("layers.0.") and name.endswith(".order")}
    alone = {"layers.0.w_o.order", "layers.0.w_down.order"}
    assert orders == (alone | {"layers.0.w_qkv.order", "layers.0.w_gate_up.order"} if same else alone)
    assert ("layers.0.w_qkv.weight" in store.tensors) != same
    assert store.manifest["format_version"] == 2
    ids = np.random.default_rng(1).integers(3, 320, 100).tolist()
    model = load_dense_model(checkpoint)
    for name, module in model.named_modules():
        if not same and name.endswith(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")):
            module.weight.data = module.weight.half().float()  # as the store rounds it
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].numpy()
    for budget in (512, 5):
        with Native(store, max_prefill_token_num=budget) as engine:
            np.testing.assert_allclose(engine.logits(ids), expected, atol=1e-3)


MIXED = {
    "Linear": QuantScheme(4, 64, True),
    "re:.*v_proj": QuantScheme(4, 32, False),  # fused with two of another scheme
    "re:.*o_proj": QuantScheme(3, -1, False),
    "re:.*up_proj": QuantScheme(2, 64, False),
    "model.layers.0.mlp.down_proj": QuantScheme(8, 32, True),
    "model.layers.1.self_attn.q_proj": QuantScheme(6, 32, False),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_mixed_precision_is_served(dtype: torch.dtype, tmp_path: Path) -> None:
    """Each linear with bits of its own; those beyond 4 bits, and what is fused with them, have 8."""
    tiny_llama(tmp_path / "dense", dtype, hidden_size=128, intermediate_size=256)
    path = quantized(tmp_path / "dense", CompressedTensorsFormat(MIXED["Linear"], MIXED), dtype)
    checkpoint, store = open_checkpoint(path), store_of(path)
    linears = ("0.w_qkv", "1.w_down", "0.w_down", "1.w_qkv")
    layouts = [store.tensors[f"layers.{name}.qweight"].layout for name in linears]
    assert layouts == ["w4.n64k64", "w4.n64k64", "w8.n64k64", "w8.n64k64"]
    model = load_dense_model(checkpoint).eval()
    ids = np.random.default_rng(1).integers(3, 320, 100).tolist()
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].numpy()
    for bits in ACTIVATION_BITS:
        for budget in (512, 5):
            with Native(store, max_prefill_token_num=budget, activation_bits=bits) as engine:
                np.testing.assert_allclose(engine.logits(ids), expected, atol=ATOL[bits])
