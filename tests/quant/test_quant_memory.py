"""Activations on disk change nothing but memory; what a run will take is said before it begins."""

import logging

import pytest
import torch
from architectures import CASES
from test_quant_resume import weights_of
from test_quant_run import options_of
from tiny_models import byte_tokenizer, make_model

from turbomill.calib_data import load_windows
from turbomill.convert.checkpoint import open_checkpoint
from turbomill.quant import activations, quantize
from turbomill.quant import estimate as estimate_module
from turbomill.quant import run as run_module
from turbomill.quant.activations import Activations, SpooledActivations, choose
from turbomill.quant.estimate import activation_bytes, estimate
from turbomill.quant.recipe import RECIPES


@pytest.mark.parametrize("make", [Activations, SpooledActivations], ids=["memory", "disk"])
def test_activations_are_a_list_of_tensors(tmp_path, make):
    kept = make(tmp_path) if make is SpooledActivations else make()
    parts = [torch.randn(2, 5, 4), torch.randn(1, 3, 4), torch.randn(2, 5, 4).bfloat16()]
    for part in parts:
        kept.append(part)
    assert len(kept) == 3 and all(torch.equal(a, b) for a, b in zip(kept, parts, strict=True))
    assert kept[2].dtype == torch.bfloat16
    other = torch.randn(1, 3, 8)[..., ::2]
    kept[1] = other
    assert torch.equal(kept[1], other) and torch.equal(kept[0], parts[0]) and torch.equal(kept[2], parts[2])
    kept.clear()
    assert len(kept) == 0
    kept.append(parts[1])
    assert torch.equal(kept[0], parts[1])
    assert list(tmp_path.iterdir()) == []  # the file has no name: a kill leaves nothing


def test_a_spooled_tensor_keeps_its_shape(tmp_path):
    kept = SpooledActivations(tmp_path)
    kept.append(torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"spooled as torch.float32 \[2, 3\]"):
        kept[0] = torch.zeros(3, 2)


def test_large_activations_go_to_disk_by_themselves(tmp_path, monkeypatch):
    monkeypatch.setattr(activations, "available_memory", lambda: 10**9)
    assert type(choose(10**8, None, tmp_path)()) is Activations
    assert type(choose(4 * 10**8, None, tmp_path)()) is SpooledActivations
    assert type(choose(4 * 10**8, False, tmp_path)()) is Activations
    assert type(choose(10, True, tmp_path)()) is SpooledActivations


@pytest.mark.parametrize(("name", "method"), [("llama", "gptq"), ("llama", "awq"), ("qwen3-moe", "gptq")])
def test_spooled_runs_give_the_same_bits(tmp_path, text_file, name, method):
    if name == "llama":
        make_model(tmp_path / "model")
    else:
        CASES[name].make(tmp_path / "model", torch.float16)
        byte_tokenizer().save_pretrained(tmp_path / "model")
    for spool in (False, True):
        options = options_of(text_file, spool=spool, batch_size=3)
        quantize(tmp_path / "model", tmp_path / str(spool), method, options)
    assert weights_of(tmp_path / "True") == weights_of(tmp_path / "False")


def test_an_estimate_comes_before_the_work(tiny, text_file, tmp_path, monkeypatch, caplog):
    said = []
    write = run_module._Layers.write
    monkeypatch.setattr(
        run_module._Layers, "write", lambda self, done: (said.append(caplog.text), write(self, done))[1]
    )
    caplog.set_level(logging.INFO, "turbomill")
    logging.getLogger("turbomill").propagate = True
    quantize(tiny, tmp_path / "out", "gptq", options_of(text_file))
    assert "GB of memory" in said[0] and "GB written" in said[0]


def test_estimates_follow_the_shapes(tmp_path, text_file, monkeypatch):
    monkeypatch.setattr(
        estimate_module, "_speeds", lambda _device: (1e10, 1e8, 1e-6)
    )  # not those of the moment
    path = make_model(tmp_path / "m", hidden=256, inter=1024, num_hidden_layers=4)
    checkpoint, cpu = open_checkpoint(path), torch.device("cpu")
    options = options_of(text_file, spool=False)
    few, many = (load_windows(str(text_file), checkpoint.tokenizer(), n, 64) for n in (2, 64))
    layer = 4 * sum(k * n for k, n in checkpoint.arch.linear_shapes(checkpoint.config).values())
    rtn = estimate(checkpoint, None, RECIPES["rtn"], options, cpu)
    small = estimate(checkpoint, few, RECIPES["gptq"], options, cpu)
    large = estimate(checkpoint, many, RECIPES["gptq"], options, cpu)
    spooled = estimate(checkpoint, many, RECIPES["gptq"], options_of(text_file, spool=True), cpu)
    assert layer < rtn.memory < small.memory < large.memory
    streams = 1 + RECIPES["gptq"].correct
    assert large.memory - spooled.memory == activation_bytes(checkpoint, many, streams)
    assert activation_bytes(checkpoint, many, 1) == 4 * 64 * 64 * (256 + 256)
    assert rtn.seconds < small.seconds < large.seconds
    size = quantize(path, tmp_path / "out", "rtn", options).disk_bytes
    assert rtn.disk == pytest.approx(size, rel=0.05)
