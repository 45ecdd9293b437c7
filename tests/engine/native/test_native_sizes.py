"""Sizes that are no multiples of the layout's tiles, and sizes that were padded: the same logits."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from native_engine import Native, store_of, tiny_llama
from quantized_models import quantized
from safetensors.torch import load_file, save_file

from turbomill.convert.checkpoint import open_checkpoint
from turbomill.convert.formats.awq import AwqFormat
from turbomill.convert.formats.base import WeightFormat
from turbomill.convert.formats.gptq import GptqFormat
from turbomill.convert.linear import QuantScheme
from turbomill.convert.reference import load_dense_model

# q has 48 rows, o 48 columns: three quarters of a tile, a group and a half of 32.
SMALL = {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1}
IDS = np.random.default_rng(1).integers(3, 320, 40).tolist()


@pytest.mark.parametrize(
    ("form", "fields"),
    [
        (AwqFormat(QuantScheme(4, 64, False)), {"intermediate_size": 10944}),  # K of down_proj: 171 tiles
        (GptqFormat(QuantScheme(4, 128, False), 2), {"intermediate_size": 10944}),  # and 85.5 groups
        (GptqFormat(QuantScheme(4, 32, True), 2), {"intermediate_size": 1440}),  # N of gate and up
        (GptqFormat(QuantScheme(4, 32, True)), SMALL),
        (GptqFormat(QuantScheme(4, -1, False)), SMALL),
        (AwqFormat(QuantScheme(4, 16, False)), SMALL),
    ],
    ids=["K=10944", "K=10944-ragged", "N=1440", "48-ragged", "48-channel", "48-dense"],
)
def test_odd_sizes(form: WeightFormat, fields: dict[str, int], tmp_path: Path) -> None:
    tiny_llama(tmp_path / "dense", torch.float16, initializer_range=0.1, **fields)
    path = quantized(tmp_path / "dense", form, torch.float16)
    store = store_of(path)
    model = load_dense_model(open_checkpoint(path))
    for name, module in model.named_modules():
        if name.endswith("_proj") and form.scheme is not None and form.scheme.group == 16:
            module.weight.data = (
                module.weight.half().float()
            )  # no layout for it: dense, as the store rounds it
    with torch.no_grad():
        expected = model(torch.tensor([IDS])).logits[0].numpy()
    for budget in (512, 5):
        with Native(store, max_prefill_token_num=budget) as engine:
            np.testing.assert_allclose(engine.logits(IDS), expected, atol=1e-3)


@pytest.mark.parametrize("packed", [False, True])
def test_padded_sizes_change_nothing(packed: bool, tmp_path: Path) -> None:
    """As Qwen published 29568 as 29696: rows of zeros in gate and up, columns of zeros in down."""
    tiny_llama(tmp_path / "plain", torch.float16, intermediate_size=96)
    path = tmp_path / "padded"
    path.mkdir()
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    for name, tensor in tensors.items():
        if "gate_proj" in name or "up_proj" in name:
            tensors[name] = torch.nn.functional.pad(tensor, (0, 0, 0, 32))
        if "down_proj" in name:
            tensors[name] = torch.nn.functional.pad(tensor, (0, 32))
    save_file(tensors, path / "model.safetensors")
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"intermediate_size": 128}))
    paths = [tmp_path / "plain", path]
    if packed:  # of groups that end where the padding begins
        paths = [quantized(p, GptqFormat(QuantScheme(4, 32, False), 2), torch.float16) for p in paths]
    logits = []
    for checkpoint in paths:
        with Native(store_of(checkpoint)) as engine:
            logits.append(engine.logits(IDS))
    np.testing.assert_allclose(logits[1], logits[0], atol=1e-4)
