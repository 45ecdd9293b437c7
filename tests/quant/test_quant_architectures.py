"""Quantization of what transformers can run: layer by layer it is the whole model, AWQ's folding changes
nothing but what rounding does, and what is written converts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from architectures import CASES
from safetensors.torch import load_file, save_file
from tiny_models import byte_tokenizer

from turbomill.convert.checkpoint import open_checkpoint
from turbomill.convert.reference import load_dense_model
from turbomill.convert.store import convert_checkpoint
from turbomill.errors import UnsupportedModelError
from turbomill.quant import QuantOptions, quantize
from turbomill.quant.decoder import StreamedDecoder

REFUSED = ("internlm2", "baichuan", "baichuan2", "mixtral", "qwen2-moe", "qwen3-moe")
# InternLM3's case has a bias on q, k and v alone, which its own code has and transformers' has not.
QUANTIZED = [name for name in CASES if name not in (*REFUSED, "internlm3", "phi3-short", "qwen2", "mistral")]


def options_of(text_file: Path, **changes) -> QuantOptions:
    fields = {"group": 32, "calib_dataset": str(text_file), "calib_samples": 4, "calib_seqlen": 64}
    return QuantOptions(**{**fields, **changes})


@pytest.mark.parametrize("name", QUANTIZED)
def test_layer_by_layer_is_the_whole_model(name, tmp_path):
    model = CASES[name].make(tmp_path / "model")
    ids = torch.randint(3, 320, (2, 150 if name == "phi3-long" else 70))
    with torch.no_grad():
        expected = model(ids, output_hidden_states=True).hidden_states
    decoder = StreamedDecoder(open_checkpoint(tmp_path / "model"))
    (hidden,) = decoder.embed([ids])
    torch.testing.assert_close(hidden, expected[0])
    for index in range(decoder.num_layers - 1):  # the last of transformers' states is behind the final norm
        hidden = decoder.run(decoder.load(index), index, hidden)
        torch.testing.assert_close(hidden, expected[index + 1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["gemma2", "phi3"])
def test_awq_folds_scales_without_changing_the_model(name, tmp_path, text_file):
    """A scale that went into a linear but not into its norm (or into a norm without its offset) moves the
    logits by more than rounding does."""
    CASES[name].make(tmp_path / "model", torch.float16)
    file = tmp_path / "model" / "model.safetensors"
    state = load_file(file)
    for key, tensor in state.items():  # a few large channels, as real models have: they get large scales
        if "input_layernorm" in key or "feedforward_layernorm" in key:
            tensor.copy_(torch.exp(torch.randn(tensor.shape)) - (1 if name == "gemma2" else 0))
    save_file(state, file, {"format": "pt"})
    byte_tokenizer().save_pretrained(tmp_path / "model")
    model = load_dense_model(open_checkpoint(tmp_path / "model"))
    ids = torch.randint(3, 256, (1, 60))
    errors = {}
    for method in ("rtn", "awq"):
        quantize(tmp_path / "model", tmp_path / method, method, options_of(text_file))
        checkpoint = open_checkpoint(tmp_path / method)
        with torch.no_grad():
            errors[method] = (load_dense_model(checkpoint)(ids).logits - model(ids).logits).square().mean()
    assert errors["awq"] < 1.5 * errors["rtn"]
    assert convert_checkpoint(tmp_path / "awq", tmp_path / "store").scheme is not None


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_quantized_is_refused_in_one_line(name, tmp_path, text_file):
    CASES[name].make(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    with pytest.raises(UnsupportedModelError, match="cannot be quantized here") as error:
        quantize(tmp_path / "model", tmp_path / "out", "awq", options_of(text_file))
    assert "\n" not in str(error.value) and not (tmp_path / "out").exists()
